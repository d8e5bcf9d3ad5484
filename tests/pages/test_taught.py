"""The pages that teach: their pictures are what the programs draw, their figures are measured."""

import importlib.util
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.pages.blocks import DOCS, README, ROOT, blocks_of, run

PICTURES = sorted(path for path in (ROOT / "docs/pictures").glob("*.py") if path.stem != "style")
PAGES = {path.stem: path.read_text() for path in DOCS}
MOST_BYTES, MOST_TERMS = 60_000, 40


def description(svg):
    """The numbers that the program wrote into its picture."""
    (text,) = ElementTree.fromstring(svg).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(text.text)


def told(value):
    """All numbers of a description, in their order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in told(value[key])]
    if isinstance(value, list):
        return [number for part in value for number in told(part)]
    return [float(value)]


@pytest.mark.parametrize("program", PICTURES, ids=lambda path: path.stem)
def test_what_is_said_of_a_picture_is_in_it(program):
    """The figures of the paragraph below a picture stand in the picture."""
    svg = program.with_suffix(".svg").read_text()
    drawn = set(figures(" ".join(re.findall(r">([^<]+)</text>", svg))))
    pages = [path.read_text() for path in DOCS]
    (page,) = [text for text in pages if f"](pictures/{program.stem}.svg)" in text]
    said = page.split(f"](pictures/{program.stem}.svg)")[1].split("\n\n")[1]
    assert [figure for figure in figures(said) if figure not in drawn] == []


@pytest.mark.parametrize("program", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_what_its_program_draws(program, tmp_path):
    ran = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    drawn = (tmp_path / f"{program.stem}.svg").read_text()
    kept = program.with_suffix(".svg").read_text()
    assert len(kept.encode()) < MOST_BYTES
    numbers = [told(description(svg)) for svg in (drawn, kept)]
    np.testing.assert_allclose(*numbers, rtol=2e-3)  # MATCHA's solution depends on scipy
    version = re.compile(r"Matplotlib v[\d.]+")
    if version.search(drawn).group() == version.search(kept).group():
        places = [
            np.array(re.findall(r"-?\d+\.\d+", text.split("</metadata>")[1]), float)
            for text in (drawn, kept)
        ]
        np.testing.assert_allclose(*places, atol=0.05)


def figures(text):
    """The numbers of some text, without those of code and of links' targets."""
    return re.findall(
        r"\d+(?:,\d{3})*(?:\.\d+)?", re.sub(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", text)
    )


def quoting():
    """(page, row, its cells with figures, the results that have them) of each row of a table.

    A row's last cell links to its results, or the header's first cell to those of all rows.
    """
    link = re.compile(r"\]\((\.\./experiments/results/[^)#]*)[^)]*\)")
    for path in DOCS:
        for table in re.findall(r"(?:^\|.*\|$\n?)+", path.read_text(), re.M):
            header, _, *rows = (row.split("|")[1:-1] for row in table.splitlines())
            for _, *cells in rows:
                if found := link.search(cells[-1]) or link.search(header[0]):
                    yield path, "|".join(cells), cells, path.parent / found[1]


ROWS = list(quoting())


@pytest.mark.parametrize(
    ("row", "cells", "page"), [each[1:] for each in ROWS], ids=[each[0].stem for each in ROWS]
)
def test_a_figure_that_is_quoted_stands_in_the_results(row, cells, page):
    """The figures of each cell but the first stand there together, in one line."""
    lines = [set(figures(line)) for line in page.read_text().splitlines()]
    cells = [set(figures(cell)) for cell in cells]
    assert any(cells), row
    assert [cell for cell in cells if not any(cell <= line for line in lines)] == []


def glossary():
    (block,) = re.findall(r"^```\{glossary\}\n(.*?)^```", PAGES["glossary"], re.S | re.M)
    return re.findall(r"^(\S.*)$", block, re.M)


def test_terms_that_pages_link_to_are_in_the_glossary():
    known = {term.lower() for term in glossary()}
    for name, text in PAGES.items():
        linked = re.findall(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`", text)
        assert [term for term in linked if term.lower() not in known] == [], name


def test_what_the_readme_says_the_first_run_prints_is_on_the_page_too():
    (block,) = [each for each in blocks_of(ROOT / "docs/start.md") if each.language == "text"]
    told = re.search(r"^```\n(  test accuracy.*?)```", README.read_text(), re.M | re.S)[1]
    assert [line for line in told.splitlines() if line not in block.text.splitlines()] == []


@pytest.mark.slow
def test_the_loop_with_equinox_runs_where_it_is_installed(tmp_path):
    if importlib.util.find_spec("equinox") is None:
        pytest.skip("equinox is not installed")
    marked = [each for each in blocks_of(ROOT / "docs/scripts.md") if each.why_not]
    (block,) = marked
    assert block.why_not == "needs equinox"
    assert "FitResult" in run(block.text, tmp_path)
