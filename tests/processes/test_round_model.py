"""No order of steps, kills, stops and joins makes a round of workers that come and go wrong."""

import pytest

from tests.processes import round_model


@pytest.mark.parametrize(
    ("seats", "rounds", "faults", "least"),
    [
        (2, 2, 3, 60_000),
        (2, 3, 2, 40_000),
        (3, 2, 1, 10_000),
        pytest.param(3, 2, 3, 2_000_000, marks=pytest.mark.slow),
    ],
)
def test_all_survivors_apply_what_was_decided(seats, rounds, faults, least):
    assert round_model.check(seats=seats, rounds=rounds, faults=faults) > least


def test_who_has_slept_and_does_not_look_again_applies_what_was_overwritten(monkeypatch):
    monkeypatch.setattr(round_model, "is_whole", lambda *given: True)
    with pytest.raises(round_model.WrongError, match="applies"):
        round_model.check(seats=2, rounds=3, faults=3)


def test_who_has_slept_and_reads_sums_in_memory_that_is_used_again_applies_others(monkeypatch):
    monkeypatch.setattr(round_model, "place_of", lambda decision, number: (0, number % 2))
    with pytest.raises(round_model.WrongError, match="applies"):
        round_model.check(seats=2, rounds=3, faults=1)


def test_a_decision_that_is_set_twice_makes_survivors_unlike(monkeypatch):
    def set_again(decisions, number, made):
        return (*decisions[: number + 1], made)

    monkeypatch.setattr(round_model, "set_once", set_again)
    with pytest.raises(round_model.WrongError):
        round_model.check(seats=2, rounds=2, faults=3)
