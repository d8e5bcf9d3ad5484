"""The drill of mutants: its list is true, and a mutant dies where a test looks for it."""

import ast
import pathlib

import pytest

from experiments.drills import mutant_list, mutants
from experiments.drills.mutant_list import Mutant

ROOT = pathlib.Path(__file__).parent.parent
LIST = mutant_list.read()
ROOMS = ("quota", "ordering", "rounds", "data", "processes", "bilevel", "bilevel/rounds")
PROCESSES = ("comm", "liveness", "launcher")  # one room when the mutants were drawn

MODULE = '''"""Sums.

>>> total([1, 2])
3
"""


def total(values):
    if not values:
        return 0
    return values[0] + total(values[1:])


def spread(values):
    return max(values) - min(values)
'''
TESTS = """from hetjax.tiny import sums


def test_the_whole_is_the_sum_of_its_parts():
    assert sums.total([2, 3]) == sums.total([2]) + sums.total([3])


def test_nothing_adds_up_to_zero():
    assert sums.total([]) == 0
"""
RETURN = "    return values[0] + total(values[1:])"
ZERO = Mutant("tiny/1", "hetjax/tiny/sums.py", "step", "        return 0", "        return 1")
SPREAD = "    return max(values) - min(values)"
UNTESTED = Mutant("tiny/2", ZERO.file, "extreme", SPREAD, SPREAD.replace("min", "max"))


@pytest.fixture
def tiny(tmp_path):
    """A checkout with one module and its tests."""
    root = tmp_path / "copy"
    for file, text in {
        "hetjax/__init__.py": "",
        "hetjax/tiny/__init__.py": "",
        "hetjax/tiny/sums.py": MODULE,
        "tests/tiny/test_sums.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--doctest-modules"\n',
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


@pytest.mark.parametrize("mutant", LIST, ids=lambda mutant: mutant.name)
def test_a_listed_mutant_stands_once_in_its_file_and_parses(mutant):
    assert mutant_list.locate(ROOT, mutant) == mutant.file
    text = (ROOT / mutant.file).read_text()
    changed = mutant_list.mutated(text, mutant)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert mutants.tests_of(ROOT, mutant.room, mutant.file)


def test_the_list_has_all_kinds_from_all_rooms_in_equal_shares():
    assert len({mutant.name for mutant in LIST}) == len(LIST) == 60
    drawn = [("processes" if m.room in PROCESSES else m.room, m.kind) for m in LIST]
    rooms = [room for room, _ in drawn]
    assert {rooms.count(room) for room in ROOMS} == {8, 9}
    for room in ROOMS:
        assert {kind for each, kind in drawn if each == room} == {kind for _, kind in drawn}


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_nearest_test_that_finds_it_or_survives(tiny):
    record = mutants.run_in(tiny, UNTESTED, secs=60)
    assert (record["outcome"], record["by"]) == ("survived", "")
    assert (tiny / UNTESTED.file).read_text() == MODULE
    record = mutants.run_in(tiny, ZERO, secs=60)
    assert record["outcome"] == "killed"
    assert record["by"] == "hetjax/tiny/sums.py::hetjax.tiny.sums"  # the doctest is nearest
    (tiny / ZERO.file).write_text(MODULE.replace(">>>", "..."))
    record = mutants.run_in(tiny, ZERO, secs=60)
    assert record["by"] == "tests/tiny/test_sums.py::test_the_whole_is_the_sum_of_its_parts"


def test_lines_that_moved_are_found_with_another_indentation(tiny):
    moved = MODULE.replace(RETURN, f"    else:\n    {RETURN}")
    (tiny / "hetjax/tiny/sums.py").write_text("")
    (tiny / "hetjax/sums.py").write_text(moved)
    mutant = ZERO._replace(old=RETURN, new=RETURN.replace("+", "-"))
    assert mutant_list.locate(tiny, mutant) == "hetjax/sums.py"
    assert mutant_list.mutated(moved, mutant) == moved.replace("+", "-")


def test_lines_that_are_gone_or_stand_twice_are_named(tiny):
    record = mutants.run_in(tiny, ZERO._replace(old="    return 5"), secs=60)
    assert record["outcome"] == "gone"
    assert "its lines are gone; write in mutants.jsonl what they are now" in record["by"]
    (tiny / "hetjax/tiny/more.py").write_text(MODULE + MODULE)
    (tiny / "hetjax/tiny/sums.py").unlink()
    record = mutants.run_in(tiny, ZERO, secs=60)
    assert "in 2 places (hetjax/tiny/more.py:10, hetjax/tiny/more.py:25)" in record["by"]


def test_the_tables_count_what_became_of_each_and_say_where_it_lived():
    def record(mutant, commit, outcome, by="", **more):
        own = {"name": mutant.name, "digest": mutant.digest, "commit": commit}
        own |= {"include_slow": False, "outcome": outcome, "by": by, "secs": 30.0}
        return {**own, "file": mutant.file, **more}

    records = [
        record(ZERO, "1234567", "killed", "tests/tiny/test_sums.py::test_nothing"),
        record(UNTESTED, "1234567", "survived"),
        record(ZERO, "89abcde", "gone", "its lines are gone"),
        record(UNTESTED._replace(new="    return 0"), "89abcde", "killed"),  # not of the list
        record(UNTESTED, "89abcde", "timed out", "after 9 s", file="hetjax/sums.py"),
    ]
    text = mutants.table([ZERO, UNTESTED], records)
    for row in (
        "| 1234567 | 2 | 1 | 0 | 1 | 0 | 0 | 1.0 |",
        "| 89abcde | 2 | 0 | 1 | 0 | 0 | 1 | 1.0 |",
        "| gone: its lines are gone |  |",
        "| timed out: after 9 s (in hetjax/sums.py) | 1234567 |",
    ):
        assert row in text
