"""Links among the pages, the files and programs that they name, and how a page is reached."""

import fnmatch
import importlib.util
import os
import re

import pytest

from docs.extensions import cards, outside
from tests.pages.blocks import DOCS, PAGES, README, ROOT, without_code

PAGES = [*PAGES, *sorted((ROOT / "experiments/results").rglob("*.md"))]


def slugs(path):
    """The anchors of a page, as GitHub makes them from its titles."""
    text = without_code(path)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = re.findall(r"^\((\S+)\)=$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles} | {*named}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    text = without_code(path)
    wrong = []
    for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in slugs(file)):
            wrong.append(target)
    assert wrong == []


INCLUDE = re.compile(r"^[`:]{3,}\{(?:literal)?include\} (\S+)", re.MULTILINE)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_a_page_that_includes_a_file_links_it_right_above(path):
    """The repository shows the link alone; `test_every_link_leads_somewhere` follows it."""
    text = path.read_text()
    for found in INCLUDE.finditer(text):
        assert f"]({found[1]})" in text[: found.start()].rstrip().rpartition("\n\n")[2], found[1]
    assert sum(len(INCLUDE.findall(each.read_text())) for each in DOCS) > 10  # they are found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_programs_that_are_named_are_there(path):
    text = path.read_text()
    files = re.findall(r"`((?:configs|docs|experiments|hetjax|tests)/[\w./]*\w)/?`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    modules = re.findall(r"python -m ((?:experiments|hetjax)[\w.]*\w)", text)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def entries(path):
    """The pages that the toctrees of a page name, patterns among them."""
    text = path.read_text()
    text = cards.with_cards(text) if path == ROOT / "docs/index.md" else text
    for toctree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.S | re.M):
        for line in toctree.splitlines():
            if line and not line.startswith(":"):
                folder = path.parent.relative_to(ROOT / "docs")
                yield os.path.normpath(folder / line)


def test_each_page_is_in_the_table_of_contents():
    patterns = [pattern for path in DOCS for pattern in entries(path)]
    names = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in DOCS]
    for name in names:
        assert name == "index" or any(fnmatch.fnmatch(name, each) for each in patterns), name
    plain = {each for each in patterns if "*" not in each and "generated" not in each}
    assert plain <= set(names)


def test_the_readme_leads_into_the_site():
    linked = set(re.findall(r"\]\(docs/([\w/]+\.md)", README.read_text()))
    assert "index.md" in linked
    assert len(linked) >= 8


def shown(target, origin, page):
    page = ROOT / "docs" / page
    return outside.target_of(target, ROOT / origin, page, "https://host/repository")


def test_links_out_of_the_pages_follow_one_rule():
    here = ("docs/quotas.md", "quotas.md")
    assert shown("rounds.md#gates", *here) == "rounds.md#gates"
    assert shown("https://host/x", *here) == "https://host/x"
    assert shown("#gates", *here) == "#gates"
    results = "../experiments/results/quotas/README.md#a"
    assert shown(results, *here) == "results/generated/quotas.md#a"
    file = "https://host/repository/blob/main/tests/own_parts/gate.py"
    assert shown("../tests/own_parts/gate.py", *here) == file
    manifest = "https://host/repository/blob/main/docs/kubernetes/jobset.yaml"
    assert shown("kubernetes/jobset.yaml", "docs/kubernetes.md", "kubernetes.md") == manifest
    assert shown("../tests", *here) == "https://host/repository/tree/main/tests"
