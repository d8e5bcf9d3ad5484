"""No order of steps, kills, stops and joins makes a round of workers that come and go wrong."""

import pytest

from tests.comm import round_model


@pytest.mark.parametrize(
    ("seats", "rounds", "faults", "least"),
    [
        (2, 3, 2, 40_000),
        (3, 2, 1, 10_000),
        pytest.param(3, 2, 3, 2_000_000, marks=pytest.mark.slow),
    ],
)
def test_all_survivors_apply_what_was_decided(seats, rounds, faults, least):
    assert round_model.check(seats=seats, rounds=rounds, faults=faults) > least


def set_again(decisions, number, made):
    return (*decisions[: number + 1], made)


@pytest.mark.parametrize(
    ("name", "wrong", "rounds", "faults"),
    [
        # Who has slept and does not look again applies what was overwritten.
        ("is_whole", lambda *given: True, 3, 3),
        # Who reads sums in memory that is used again applies others.
        ("place_of", lambda decision, number: (0, number % 2), 3, 1),
        ("set_once", set_again, 2, 3),
    ],
)
def test_without_a_part_of_it_survivors_apply_something_else(
    name, wrong, rounds, faults, monkeypatch
):
    monkeypatch.setattr(round_model, name, wrong)
    with pytest.raises(round_model.WrongError, match=None if name == "set_once" else "applies"):
        round_model.check(seats=2, rounds=rounds, faults=faults)
