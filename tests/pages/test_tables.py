"""What pages quote of the code: tables of parts and fields, refusals, extracts of files."""

import ast
import re

import pytest

from experiments import option_tables
from hetjax.config import kinds
from tests.pages.blocks import DOCS, ROOT, blocks, blocks_of, run


@pytest.mark.parametrize(("path", "text"), option_tables.pages().items(), ids=("parts", "fields"))
def test_the_tables_of_parts_and_fields_are_those_of_the_code(path, text):
    assert path.read_text() == text, "write them anew: python -m experiments.option_tables"


@pytest.mark.parametrize(
    ("page", "group"),
    [("quotas", "quota"), ("orders", "ordering"), ("reducers", "reducer"), ("gates", "gate")],
)
def test_the_table_of_a_topic_names_parts_that_there_are(page, group):
    """It says which to take; all of them, and so a new one, are in parts.md."""
    kind = kinds.KINDS[group]
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text.partition(f"| `{group}.{kind.key}` |")[2].partition("\n\n")[0]
    told = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert told
    assert {*told} <= kind.registry.keys()


def lines_of(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


EXTRACTS = [block for path in DOCS for block in blocks_of(path) if block.language == "py"]


@pytest.mark.parametrize("block", EXTRACTS, ids=lambda block: f"{block.path.stem}:{block.line}")
def test_an_extract_is_of_a_file_that_its_section_names(block):
    """It has lines of the file but for blank ones; `...` stands for some that are left out."""
    before = "\n".join(block.path.read_text().splitlines()[: block.line - 1])
    section = re.split(r"^## ", before, flags=re.MULTILINE)[-1]
    files = [block.path.parent / name for name in re.findall(r"\]\(([\w./]+\.py)\)", section)]
    texts = ["\n".join(lines_of(file.read_text())) for file in files]
    extracts = ["\n".join(lines_of(each)) for each in block.text.split("\n...\n")]
    assert any(all(each in text for each in extracts) for text in texts), files


@pytest.mark.slow
def test_quotas_follow_the_changes_of_speed_as_the_page_says(tmp_path):
    page = ROOT / "docs/configuration.md"
    (block,) = (block for title, block in blocks(page) if title == "Changes of speed")
    (tmp_path / "changes.py").write_text(block)
    program = (
        "import json\n"
        "from experiments import train\n"
        "from hetjax.zoo import config\n"
        "loaded = config.load('changes.py')\n"
        "loaded.cluster.clock = 'virtual'\n"
        "result = train.train_and_evaluate(config.validate(loaded), None, progress=False)\n"
        "print(json.dumps([line['quotas'] for line in result.history if line['full']]))\n"
        "print(json.dumps([line['round'] for line in result.history if line['full']]))\n"
    )
    lines = run(program, tmp_path).splitlines()[-2:]
    quotas, rounds = map(ast.literal_eval, lines)
    by_round = dict(zip(rounds, quotas, strict=True))
    text = page.read_text()
    told = re.findall(r"(\d) (\d) (\d) (\d)\s+\(round\s+(\d+)\)", text)
    assert len(told) == 4
    for *expected, when in told:
        assert by_round[int(when)] == [int(quota) for quota in expected]
    tried = "some rounds after each change \\((\\d+), (\\d+) and (\\d+) here\\)"
    equal = [
        when
        for when, quotas in by_round.items()
        if when and max(quotas) - min(quota for quota in quotas if quota) <= 1
    ]
    assert [str(when) for when in equal] == list(
        re.search(tried, " ".join(text.split()), re.IGNORECASE).groups()
    )
