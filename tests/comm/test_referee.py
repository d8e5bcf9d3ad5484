"""The referee of rounds: by hand, and no interleaving that its checker finds makes it wrong."""

import ast
import pathlib
import types

import pytest

from hetjax.comm import referee
from hetjax.comm.views import Member, Order
from tests.comm import referee_model, referee_moves, referee_world
from tests.comm.referee_world import Faults, WrongError

SOURCE = pathlib.Path(referee.__file__).read_text()
A, B, C = (Member(rank, 0) for rank in range(3))


def after(state, *events):
    for event in events:
        state = referee.step(state, event)
    return state


def test_a_round_is_decided_when_all_have_its_sum():
    state = referee.begun([A, B])
    assert referee.order(state, A, 0) == Order("compute")
    state = after(state, ("ready", B, 0, "of B", "b"), ("ready", B, 0, "heard twice", "b2"))
    assert referee.order(state, B, 0) == Order("wait")
    state = after(state, ("ready", A, 0, "of A", "a"))
    take = Order("take", (0, (A, B), ("of A", "of B"), ("a", "b")))
    assert [referee.order(state, m, 0) for m in (A, B)] == [take, take]
    state = after(state, ("has", A, 0, 0))
    assert [referee.order(state, m, 0).kind for m in (A, B)] == ["wait", "take"]
    state = after(state, ("has", B, 0, 0))
    assert state.view == (0, (A, B), ("of A", "of B"), (A, B), (), ())
    assert referee.order(state, B, 0) == Order("apply", state.view)
    assert referee.order(state, A, 1) == Order("compute")


def test_a_death_before_all_have_the_sum_begins_another_attempt_without_the_dead():
    state = after(
        referee.begun([A, B, C]), *(("ready", m, 0, m.rank, f"at {m.rank}") for m in (A, B, C))
    )
    dies = after(state, ("has", A, 0, 0), ("gone", C, "was killed"))
    assert referee.order(dies, A, 0) == Order("take", (1, (A, B), (0, 1), ("at 0", "at 1")))
    dies = after(dies, ("has", A, 0, 1), ("has", B, 0, 0))  # that of B is of the old attempt
    assert dies.round_index == 0
    dies = after(dies, ("has", B, 0, 1))
    assert (dies.view.sum, dies.view.changes) == ((A, B), ((C, "was killed"),))
    assert referee.order(dies, C, 0) == Order("leave")
    assert after(dies, ("gone", C, "was late"), ("ready", C, 1, "", ""), ("joins", C)) == dies
    # Where all that live have the sum, what the dead contributed counts.
    has = after(state, ("has", A, 0, 0), ("has", B, 0, 0), ("gone", C, "was killed"))
    assert (has.view.sum, has.view.members) == ((A, B, C), (A, B))


def test_a_sum_in_slices_is_gathered_when_each_of_its_members_has_added_one():
    state = after(referee.begun([A]), ("joins", C), ("ready", A, 0, "", ""), ("has", A, 0, 0))
    state = after(state, ("donated", A, 1, "there"), ("holds", C, 1), ("ready", A, 1, "", ""))
    state = after(state, ("has", A, 1, 0), ("has", C, 1, 0), ("joins", B))
    state = after(state, *(("ready", m, 2, "", "") for m in (A, C)), ("added", A, 2, 0, "slice"))
    assert referee.waited_for(state) == (C,)
    assert [referee.order(state, m, 2).kind for m in (A, C)] == ["wait", "take"]
    old = after(state, ("gone", C, "was killed"), ("added", A, 2, 0, "heard again"))
    assert (old.added, referee.order(old, A, 2).kind) == ((), "take")
    state = after(state, ("added", C, 2, 0, "its slice"), ("added", C, 2, 0, "heard twice"))
    gather = Order("gather", (0, (A, C), ("slice", "its slice")))
    assert [referee.order(state, m, 2) for m in (A, C)] == [gather, gather]
    state = after(state, ("has", A, 2, 0), ("has", C, 2, 0))
    # A newcomer has no slice; it waits for those of the members.
    state = after(state, ("donated", A, 3, "there"), ("holds", B, 3))
    state = after(state, *(("ready", m, 3, "", "") for m in (A, C)), ("added", B, 3, 0, None))
    assert (referee.order(state, B, 3).kind, referee.waited_for(state)) == ("wait", (A, C))
    state = after(state, ("added", A, 3, 0, "a"), ("added", C, 3, 0, "c"), ("has", A, 3, 0))
    assert referee.order(state, B, 3) == Order("gather", (0, (A, C), ("a", "c")))
    assert referee.waited_for(state) == (B, C)


def test_a_newcomer_takes_a_sum_before_it_contributes():
    state = after(referee.begun([A]), ("joins", C), ("ready", A, 0, "of A", "a"))
    assert referee.order(state, C, None) == Order("wait")
    state = after(state, ("has", A, 0, 0))
    assert (state.view.members, state.view.joining) == ((A,), (C,))
    assert referee.order(state, A, 1) == Order("donate")
    state = after(state, ("donated", A, 1, "there"), ("ready", A, 1, "of A", "a"), ("has", A, 1, 0))
    assert referee.order(state, C, None) == Order("receive", (1, "there"))
    state = after(state, ("holds", C, 1))
    assert referee.order(state, C, 1) == Order("take", (0, (A,), ("of A",), ("a",)))
    state = after(state, ("has", C, 1, 0))
    assert (state.view.sum, state.view.members) == ((A,), (A, C))
    assert state.view.changes == ((C, referee.JOINED),)
    assert referee.order(state, C, 2) == Order("compute")


def test_the_run_is_lost_only_when_no_newcomer_may_hold_the_state():
    state = after(referee.begun([A]), ("joins", B), ("joins", C), ("ready", A, 0, "", ""))
    state = after(state, ("has", A, 0, 0), ("donated", A, 1, "there"), ("gone", A, "was killed"))
    assert referee.order(state, B, None) == Order("lack", 1)
    lost = after(state, ("lacks", B, 1), ("lacks", C, 1))
    assert referee.order(lost, B, None) == Order("ended")
    kept = after(state, ("lacks", B, 1), ("holds", C, 1))
    assert (kept.leader, referee.order(kept, C, 1)) == (C, Order("take", (0, (), (), ())))
    kept = after(kept, ("has", C, 1, 0))  # a round without a sum
    assert (kept.view.members, kept.view.joining) == ((C,), (B,))


def test_who_has_done_its_last_round_waits_until_all_is_written_or_it_leads():
    state = after(referee.begun([A, B]), ("ends", B))
    assert [referee.order(state, m, None).kind for m in (A, B)] == ["held", "wait"]
    leads = after(state, ("gone", A, "was killed"))
    assert referee.order(leads, B, None) == Order("held")
    assert referee.order(after(state, ("finished", A)), B, None) == Order("over")


def test_the_referee_imports_no_clock_no_thread_and_no_engine():
    imports = [n for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(each) for each in imports] == [
        "from collections.abc import Callable, Iterable",
        "from typing import Any, NamedTuple",
        "from hetjax.comm.views import FIRST, JOINED, Member, MembershipView, Order",
    ]


def states(workers, rounds, faults, saves=False, sums="whole"):
    first = referee_world.begun(workers, rounds=rounds, faults=faults, saves=saves, sums=sums)
    return referee_model.check(first)[0]


@pytest.mark.parametrize(
    "bounds",
    [
        *referee_model.SMALL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in referee_model.LARGE),
    ],
    ids=str,
)
def test_no_interleaving_is_wrong(bounds):
    assert states(*bounds) > 2_000


# Bounds within which mutants of the referee are found: workers, rounds, faults.
DIES = (2, 1, Faults(deaths=1))
BOTH_DIE = (2, 2, Faults(deaths=2, joins=1))
ALL_DIE = (1, 1, Faults(deaths=2, joins=2))
LATE = (2, 2, Faults(late=1))
TWICE = (2, 2, Faults(lost=1))
ASKED = (2, 2, Faults(leaves=2))
JOINS = (2, 2, Faults(deaths=1, joins=1))
JOINS_TWICE = (2, 2, Faults(lost=1, joins=1))
DIES_TWICE = (2, 2, Faults(deaths=1, lost=1, joins=1))
NEXT_DONOR = (2, 3, Faults(deaths=1, joins=1))
OLD_LACK = (1, 2, Faults(deaths=2, lost=1, joins=2))
OLD_GIFT = (2, 3, Faults(lost=1, joins=2))
SLICES = (2, 1, Faults(deaths=1), False, "slices")
SLICES_OF_3 = (3, 1, Faults(deaths=1), False, "slices")
SLICES_TWICE = (2, 2, Faults(lost=1), False, "slices")
SLICES_JOINS = (2, 2, Faults(joins=1), False, "slices")

EACH_DIES = (2, 1, Faults(deaths=1), False, "each")
EACH_JOINS = (2, 2, Faults(joins=1), False, "each")
EACH_LEAVES = (2, 2, Faults(deaths=1, joins=1, leaves=1), False, "each")
EACH_LATE = (2, 3, Faults(late=1), False, "each")
ONE_DIES = (2, 1, Faults(deaths=1), False, "one")
ONE_LEAVES = (2, 2, Faults(leaves=1), False, "one")
ONE_LATE = (2, 2, Faults(late=1), False, "one")
ONE_TWICE = (2, 2, Faults(lost=1), False, "one")

OF_ANY = "if member not in state.joining:\n        return state\n    return state._replace("
OF_NOW = OF_ANY.replace(":", " or round_index != state.round_index:", 1)
NOW = "(round_index, attempt) == (state.round_index, state.attempt)"
DUE = "member in state.members and member not in dict(state.ready)\n    if"
HOLDERS = "return (*self.members, *(m for m in self.joining if m in self.holding))"
DECIDED = "if state.is_adding and state.has.issuperset(needed(state))"
NEEDED = "    if state.adding and state.donor is not None:\n        return state.present\n"
STAY = "tuple(m for m in holders if m not in state.leaving) or holders[:1]"
LEAVES = "return state._replace(leaving=state.leaving | ({member} & set(state.present)))"
HANDED = "(member, round_index) != (state.donor, state.round_index)"
FORGET = "return state._replace(ready=ready)"
KNOWN = "if member.incarnation <= dict(state.newest).get(member.rank, -1)"
NEXT = "donor=stay[0] if view.joining else None"
DONOR = "    if state.donor is not None and not is_there and"
OVER = "if state.is_over:\n        return Order"
ADDED = "(state, member, round_index, attempt) or"
LEADER = "return next(iter(self.holders), None)"

# What stands in the referee, what stands there instead, within which bounds it is found, as what.
MUTANTS = {
    "no new attempt": ("if member not in state.adding or state.has", "if True or state.has", DIES),
    "the same attempt": ("attempt=state.attempt + 1", "attempt=state.attempt", DIES),
    "the dead is added": ("adding=_without(state.adding, member)", "adding=state.adding", DIES),
    "units of the dead are not returned": (FORGET, "return state", DIES),
    "the dead counts": ("members=_without(state.members, member)", "members=state.members", DIES),
    "decided before all have it": (".has.issuperset(needed(state))", ".has", DIES),
    "decided before adding": (DECIDED, "if state.adding", DIES),
    "added before all are ready": ("len(state.ready) == len(state.members)", "state.ready", DIES),
    "an old attempt counts": (NOW, "round_index == state.round_index", DIES),
    "an old round counts": (NOW, "attempt == state.attempt", TWICE),
    "ready of an old round": (
        "not is_due or round_index != state.round_index",
        "not is_due",
        TWICE,
    ),
    "ready counts twice": (DUE, "member in state.members\n    if", TWICE),
    "the late comes back": ("if member not in (*state.present, *state.asking)", "if False", LATE),
    "an old incarnation": (KNOWN, "if member in (*state.present, *state.asking)", DIES_TWICE),
    "a newcomer counts twice": (KNOWN, KNOWN.replace("<=", "<"), JOINS_TWICE),
    "a newcomer counts before it holds": (HOLDERS, "return self.present", JOINS),
    "a member at once": ("stay,\n        view.joining", "view.members + view.joining,\n()", JOINS),
    "a seat is taken twice": ("if m.rank not in taken)", ")", JOINS),
    "a newcomer that waits is forgotten": (
        "(m for m in state.asking if m not in new)",
        "()",
        JOINS,
    ),
    "what the dead handed stays": ("state._replace(donor=None, handed=None)", "state", JOINS),
    "no second donor": ("stay[0] if view.joining", "stay[0] if new", NEXT_DONOR),
    "newcomers are not waited for": (NEEDED, "", JOINS),
    "a state of an old round": (f"{OF_NOW}holding", f"{OF_ANY}holding", JOINS),
    "a lack of an old round": (f"{OF_NOW}lacking", f"{OF_ANY}lacking", OLD_LACK),
    "a gift of an old round": (HANDED, "member != state.donor", OLD_GIFT),
    "a newcomer may hold": (" and self.lacking.issuperset(self.joining)", "", ALL_DIE),
    "no sum without members": ("bool(self.adding) or not self.members", "self.adding", BOTH_DIE),
    "over before it is written": (OVER, "if state.view.round_index:\n        return Order", DIES),
    "the dead leads": (LEADER, "return self.view.members[0]", DIES),
    "the last leads": (LEADER, "return next(reversed(self.holders), None)", JOINS),
    "a donor may sleep": (DONOR, DONOR.replace("if", "if False and"), JOINS),
    "a leader may sleep at the end": ("and state.ending:", "and False:", DIES),
    "a member that waits is late": ("    due -= state.ending\n", "", JOINS),
    "one asked to leave stays": (STAY, "holders", ASKED),
    "a view knows where": (", told, stay, (*", ", tuple(zip(told, lying)), stay, (*", DIES),
    "a gift outlives its round": (NEXT, f"handed=state.handed, {NEXT}", JOINS),
    "a slice of an old attempt": (ADDED, ADDED.replace("attempt", "state.attempt"), SLICES),
    "a slice of an old round": (ADDED, ADDED.replace("round_", "state.round_"), SLICES_TWICE),
    "slices stay for another attempt": ("        added=(),\n", "", SLICES),
    "gathered before all are added": ("len(slices) < len(state.adding)", "not slices", SLICES_OF_3),
    "a newcomer has a slice": (
        "for m in state.adding if m in added)",
        "for m in added)",
        SLICES_JOINS,
    ),
    "decided before all gather": (
        DECIDED,
        "if state.is_adding and (state.has | dict(state.added).keys()).issuperset(needed(state))",
        SLICES,
    ),
    "none gathers": ("if member not in added:", "if True:", SLICES),
    "a member that has added is waited for": (
        "if state.added else set()",
        "if False else set()",
        SLICES,
    ),
    "decided before all are there": (
        "if comes or set(state.members) - dict(state.ready).keys()",
        "if comes",
        EACH_DIES,
    ),
    "a newcomer misses a round": ("if comes or set", "if set", EACH_JOINS),
    "decided when it is over": ("if state.is_over or not", "if not", EACH_LEAVES),
    "the dead adds": (
        "return state._replace(adder=None) if gone",
        "return state if gone",
        ONE_DIES,
    ),
    "one that leaves adds": (" if each[1] in stay]", "]", ONE_LEAVES),
    "an adder may sleep": ("return (state.adder,)", "pass", ONE_LATE),
    "a sum of an old round": (
        "(member, round_index) != (state.adder, state.view.round_index)",
        "member != state.adder",
        ONE_TWICE,
    ),
    "read before it is added": ('Order("wait") if state.summed is None else', "", ONE_DIES),
    "all leave": (STAY, STAY.removesuffix(" or holders[:1]"), ASKED),
    "one asked to leave leaves at once": (LEAVES, 'return _gone(state, member, "left")', ASKED),
}


def mutant_of(right, wrong):
    assert SOURCE.count(right) == 1
    mutant = types.ModuleType("mutant")
    exec(SOURCE.replace(right, wrong), vars(mutant))
    return mutant


@pytest.mark.parametrize(
    ("right", "wrong", "bounds"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.slow] * (each[2] in (OLD_LACK, OLD_GIFT)))
        for name, each in MUTANTS.items()
    ],
)
def test_the_checker_finds_what_is_wrong_with(right, wrong, bounds, monkeypatch):
    monkeypatch.setattr(referee_world, "referee_lib", mutant_of(right, wrong))
    with pytest.raises(WrongError) as found:
        states(*bounds)
    assert not isinstance(found.value.__cause__, NameError)


def test_a_trail_shows_how_it_came_to_what_is_wrong(monkeypatch):
    first = referee_world.begun(2, rounds=1, faults=Faults(deaths=1))
    assert referee_model.trail(first) == []
    mutant = mutant_of(*MUTANTS["no new attempt"][:2])
    monkeypatch.setattr(referee_world, "referee_lib", mutant)
    *_, last, words = referee_model.trail(first)
    assert "dies" in last
    assert words == "the run does not come to an end"


@pytest.mark.parametrize(
    ("rule", "wrong", "bounds"),
    [("LIE", 1, EACH_LATE), ("ASKS", False, EACH_LATE), ("LIE", 1, (*EACH_LATE[:-1], "one"))],
)
def test_what_is_read_may_be_another_rounds(rule, wrong, bounds, monkeypatch):
    monkeypatch.setattr(referee_moves, rule, wrong)
    with pytest.raises(WrongError, match="is to apply"):
        states(*bounds)


def test_what_the_dead_have_put_up_lies_until_it_is_read(monkeypatch):
    monkeypatch.setattr(referee_world, "REMAIN", 1)
    with pytest.raises(WrongError, match="does not come to an end"):
        states(*EACH_DIES)


@pytest.mark.parametrize(
    ("rule", "wrong", "repeats", "words"),
    [
        ("is_readable", lambda checkpoint, began: True, 1, "readable is"),
        ("may_register", lambda world, generation: True, 2, "before the run is written"),
    ],
)
def test_without_fencing_a_sleeper_leaves_what_is_read(rule, wrong, repeats, words, monkeypatch):
    monkeypatch.setattr(referee_world, rule, wrong)
    with pytest.raises(WrongError, match=words):
        states(1, 2, Faults(repeats=repeats), saves=True)
