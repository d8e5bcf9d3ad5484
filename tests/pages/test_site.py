"""What builds the site: the links of what is built, and the digest by which CI sees changes."""

import re
import shutil

import pytest

from docs.extensions import links, outside, standing
from tests.pages.blocks import ROOT


def test_broken_links_of_a_built_site_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static/part.html").write_text('<a href="nowhere.html">')
    (tmp_path / "x.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(
        '<h1 id="top"><a href="#top"><a href="a/page.html#b"><img src="x.svg">'
        '<a href="https://host/x"><a href="a/page.html#c"><img src="y.svg">'
    )
    (tmp_path / "a/page.html").write_text('<a name="b"><a href="../index.html#top"><a href="..">')
    assert list(links.broken(tmp_path)) == [
        ("index.html", "a/page.html#c"),
        ("index.html", "y.svg"),
    ]


STANDS = {  # a part of CI: files that it stands on, and patterns of some that it does not
    "site": (
        "docs/quotas.md docs/conf.py hetjax/training/fitting.py hetjax/quota/adaptive.py "
        "hetjax/bilevel/recipes.py experiments/results/quotas/README.md tests/own_parts/gate.py "
        "experiments/results/orders/m4_weekly.svg pyproject.toml",
        r"hetjax/launcher/gang\.py|.*generated.*|.*\.jsonl",
    ),
    "engines": (
        "hetjax/comm/join.py docs/schedulers.md experiments/drills/engine_slurm.py "
        "tests/engines/test_slurm.py .ci/engines",
        r"docs/quotas\.md|hetjax/quota/.*",
    ),
}


@pytest.mark.parametrize("part", STANDS)
def test_a_part_stands_on_its_files_and_on_no_others(part):
    files, (own, others) = set(standing.files(part)), STANDS[part]
    assert {*own.split()} <= files
    assert not [name for name in files if re.fullmatch(others, name)]


def test_a_change_of_a_page_changes_the_digest(monkeypatch, tmp_path):
    names = ["docs/quotas.md", "hetjax/training/fitting.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(standing, "files", lambda part: names)
    before = standing.digest("site")
    monkeypatch.setattr(outside, "ROOT", tmp_path)
    assert standing.digest("site") == before
    (tmp_path / names[0]).write_text("another")
    assert standing.digest("site") != before


@pytest.mark.parametrize("part", standing.SHOWN)
def test_ci_runs_a_part_where_what_it_stands_on_has_changed(part):
    run, own = ((ROOT / ".ci" / name).read_text() for name in ("run", part))
    parts = re.search("^for part in (.*); do$", run, re.MULTILINE)[1]
    assert part in parts.split()
    assert 'docs.extensions.standing $part)" != "$(cat .ci/$part.passed' in run
    assert f"docs.extensions.standing {part} >.ci/{part}.passed" in own
