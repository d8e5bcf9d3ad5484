"""The section on the order: what it says of the bound and the cost, and when it is there."""

import re

import pytest

from hetjax.report import canvas, order
from tests.report import runs


def section(directory, *, measured=(), part=runs.ORDERING):
    """The section's HTML in a run of two rounds an epoch; empty where it has none."""
    lines = iter(measured)
    history = runs.make_history(
        2 * max(2, len(measured)),
        2,
        rounds_per_epoch=2,
        herding=lambda i: next(lines, None) if i % 2 else None,
    )
    summary = runs.SUMMARY if part is None else runs.SUMMARY | {"ordering": part}
    page = runs.write(directory, summary=summary, history=history)
    found = re.search(r"<section><h2>Example order.*?</section>", page, re.DOTALL)
    return found.group() if found else ""


def test_the_section_draws_the_bound_and_says_what_it_is_and_costs(tmp_path):
    first = runs.HERDING | {"epoch": 1, "inf_norm": 70.0}
    shown = section(tmp_path, measured=[first, runs.HERDING])
    assert shown.count("<svg") == 2  # for wide and narrow screens
    assert not [colour for colour in canvas.VARIABLES if colour in shown]
    targets = re.findall(r'\bid="([^"]*)"', shown)
    assert len(targets) == len(set(targets))
    assert "this order 12.1" in shown
    assert "random order 60.5" in shown
    assert (
        "After 3 epochs it is 5.0 times below that of a random order (2-norm: 4.0 times below)."
    ) in shown
    assert (
        "A microbatch takes 1.33 times as long as with random reshuffling "
        "(12.0 ms against 9.00 ms). "
        "The order keeps 496 kB a worker (2.0 copies of the parameters). "
        "Measuring the bound took 2.40 s in all"
    ) in shown


def test_a_bound_above_that_of_a_random_order_is_called_so():
    above = runs.HERDING | {"epoch": 1, "inf_norm": 121.0, "two_norm": 180.0}
    assert order.compared([above]) == (
        "After 1 epoch it is 2.0 times above that of a random order (2-norm: about equal)."
    )
    equal = runs.HERDING | {"inf_norm": 60.0, "two_norm": None}
    assert order.compared([equal]) == "After 3 epochs it is about equal to that of a random order."


def test_the_last_measurement_with_numbers_is_compared():
    lost = runs.HERDING | {"epoch": 4, "inf_norm": None}
    assert order.compared([runs.HERDING, lost]) == order.compared([runs.HERDING])


def test_without_measurements_the_cost_and_a_hint_are_left(tmp_path):
    shown = section(tmp_path)
    assert "<svg" not in shown
    assert "ordering.herding_every" in shown
    assert "1.33 times as long" in shown
    assert "Measuring the bound" not in shown


def test_without_measurements_and_cost_there_is_no_section(tmp_path):
    assert not section(tmp_path, part=None)
    assert not section(tmp_path, part=runs.ORDERING | {"running_sum_bytes": 0})


def test_measurements_of_an_order_that_costs_nothing_are_drawn(tmp_path):
    shown = section(tmp_path, measured=[runs.HERDING], part=None)
    assert shown.count("<svg") == 2
    assert "5.0 times below" in shown
    assert "microbatch" not in shown


@pytest.mark.parametrize("name", [*runs.ORDERING, *runs.HERDING])
@pytest.mark.parametrize("odd", [None, "x", float("nan"), 0, -1.0, 1e308])
def test_odd_fields_break_nothing(name, odd):
    measured = [runs.HERDING | {name: odd}]
    text = order.compared(measured) + order.cost(runs.ORDERING | {name: odd}, measured)
    assert "nan" not in text
    if order.can_draw(measured):
        assert "nan" not in order.draw_bounds(measured, width=340)


@pytest.mark.parametrize("odd", [None, "x", [1.0], {}, dict.fromkeys(runs.HERDING)])
def test_odd_records_break_nothing(tmp_path, odd):
    assert "<svg" not in section(tmp_path, measured=[odd], part=odd)
    assert section(tmp_path, measured=[odd, runs.HERDING], part=odd).count("<svg") == 2


def test_many_measurements_stay_small():
    measured = [runs.HERDING | {"epoch": i} for i in range(20_000)]
    assert len(order.draw_bounds(measured, width=900)) < 100_000
