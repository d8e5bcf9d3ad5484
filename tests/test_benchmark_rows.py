"""Tables of results: short rows, and what else is to be said below them."""

import ast
import pathlib

import pytest

from experiments.benchmarks import rows

EXPERIMENTS = pathlib.Path(rows.__file__).parents[1]


def literals(tree):
    """What a text may be, with one word for each part that is not written out."""
    if isinstance(tree, ast.Constant):
        return [str(tree.value)]
    if isinstance(tree, ast.IfExp):
        return [*literals(tree.body), *literals(tree.orelse)]
    if isinstance(tree, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "x" for each in tree.values)
        return ["".join(parts)]
    return ["x"]


def names(path):
    """The names of the rows that a file makes, as far as they are written there."""
    for scope in ast.walk(ast.parse(path.read_text())):
        if not isinstance(scope, ast.FunctionDef):
            continue
        assigned = {
            target.id: each.value
            for each in ast.walk(scope)
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        for each in ast.walk(scope):
            called = each.func if isinstance(each, ast.Call) else None
            if getattr(called, "id", getattr(called, "attr", "")) in ("Row", "_share", "_of_runs"):
                name = each.args[0]
                yield from literals(assigned.get(getattr(name, "id", ""), name))


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(EXPERIMENTS.rglob("*.py")) if "Row(" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_names_of_rows_are_short(path):
    assert [name for name in names(path) if len(name.split()) > rows.MOST_WORDS] == []


@pytest.mark.parametrize(
    "page", sorted((EXPERIMENTS / "results").rglob("*.md")), ids=lambda page: page.parent.stem
)
def test_rows_of_the_pages_of_results_are_short(page):
    rows_of = [
        line[2:-2].split(" | ") for line in page.read_text().splitlines() if line[:2] == "| "
    ]
    assert rows_of
    assert [row for row in rows_of if len(row[0].split()) > rows.MOST_WORDS] == []
    assert [cell for row in rows_of for cell in row if len(cell.split()) > 20] == []


def test_a_table_has_its_notes_below_and_is_read_again():
    found = [rows.Row("a", "≤ 2 s", "1.5 s (1.0 to 2.0)", 3), "Said.", rows.Row("b", "", "2")]
    lines = list(rows.table([*found, "Said."]))
    assert lines[0] == "| name | target | figure | n |"
    assert lines[-2:] == ["", "- Said."]
    again = list(rows.read("\n".join(lines)))
    assert again == [(*found[0][:3], "3"), (*found[2][:3], "1"), "Said."]


def test_a_long_name_is_refused_once_all_is_printed():
    long = "a " * 8 + "b"
    lines = rows.table([rows.Row(long, "", "1"), rows.Row("c", "", "1")])
    assert len([next(lines) for _ in range(4)]) == 4
    with pytest.raises(ValueError, match=f"more than 8 words: {long}"):
        next(lines)


def test_figures_have_their_range_where_they_are_several():
    assert rows.middle([1.0, 3.0, 2.0], ".1f", " s") == "2.0 s (1.0 to 3.0)"
    assert rows.middle([1.0]) == "1.00"
    assert rows.most([1.0, 2.0, 6.0]) == "2 (most 6)"
    assert rows.around([1.0, 3.0], ".1f") == "2.0 ± 1.4"
    assert rows.share([True, 0, 1]) == "2 of 3"
