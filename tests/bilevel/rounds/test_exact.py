"""The hypergradient of unequal workers is that of one device, whatever the quotas are."""

import functools

import jax
import numpy as np
import optax
import pytest

import hetjax.quota
from hetjax import bilevel
from tests.bilevel.rounds import problems

UNEQUAL = hetjax.quota.static(proportions=(7.0, 1.0, 0.0, 12.0))
TX = optax.sgd(0.2, momentum=0.5)
LIMIT = 1e-12


@functools.cache
def alone(name, steps):
    return problems.alone(*problems.given(name), TX, problems.whole(), steps)


def compared(name, steps=2, **fields):
    problem, x, y, estimator = problems.given(name)
    expected_x, expected_y, info = alone(name, steps)
    got_x, got_y, got_info, *_ = problems.in_rounds(
        problem, x, y, estimator, TX, steps, **{"quota": UNEQUAL, **fields}
    )
    assert problems.distance(problems.moved(x, expected_x), problems.moved(x, got_x)) < LIMIT
    assert problems.distance(expected_y, got_y) < LIMIT
    np.testing.assert_allclose(got_info["upper_loss"], info.upper_loss, rtol=LIMIT)
    assert not np.allclose(jax.tree.leaves(x)[-1], jax.tree.leaves(got_x)[-1])  # it moved


@pytest.mark.slow
@pytest.mark.parametrize("name", [*problems.KINDS, "forward"])
def test_unequal_quotas_give_what_one_device_gives(float64, name):
    compared(name, local="fused")


def test_adaptive_quotas_of_workers_of_unequal_speed_give_the_same(float64):
    speeds = (1.0, 2.0, 4.0, 8.0)
    cluster = {"num_workers": 4, "secs_per_microbatch": speeds, "clock": "virtual"}
    problem, x, y, estimator = problems.given("cg")
    expected, *_ = alone("cg", 4)
    fields = {"workers": None, "cluster": cluster, "quota": "adaptive"}
    *found, rounds = problems.in_rounds(problem, x, y, estimator, TX, 4, **fields)
    assert problems.distance(problems.moved(x, expected), problems.moved(x, found[0])) < LIMIT
    products = [line.quotas for what, _, line in rounds if what.kind is bilevel.Kind.PRODUCTS]
    assert products[-1][0] > products[-1][-1]  # the fast one does more, in held batches too


def test_padding_changes_nothing(float64):
    compared("reverse", microbatch_size=16, workers=8, local="stepped", quota="equal", steps=1)


@pytest.mark.parametrize("name", ["value_gap", "cg"])
def test_small_batches_are_those_of_the_order(float64, name):
    """As the package alone, given the batches that the rounds did; ratio by their own weights."""
    _, x, y, estimator = problems.given(name)
    problem, x = problems.without_rows(), {"ridge": x["ridge"]}
    fields = {"upper": {"budget": 5}, "lower": {"budget": 7}, "local": "fused", "quota": UNEQUAL}
    got, _, _, rounds = problems.in_rounds(problem, x, y, estimator, TX, 1, **fields)
    stacks = {}
    for level, data in zip(("upper", "lower"), problems.sources(), strict=True):
        new = [done.example_ids for what, done, _ in rounds if what.level == level and what.is_new]
        ids = np.stack(new).reshape(len(new), -1)
        assert ids.shape[1] == 10 if level == "upper" else 14
        stacks[level] = bilevel.Stack({k: values[ids] for k, values in data.items()})
    expected, *_ = problems.alone(problem, x, y, estimator, TX, bilevel.Batches(**stacks), 1)
    assert problems.distance(problems.moved(x, expected), problems.moved(x, got)) < LIMIT


def test_private_shards_give_what_one_device_gives(float64):
    name = "cg"
    problem, x, y, estimator = problems.given(name)
    expected, *_ = alone(name, 1)
    fields = {
        "data": {"sharing": "private"},
        "workers": 2,
        "local": "fused",
        "quota": "equal",
        "lower": {"budget": 22},
        "upper": {"budget": 16},
    }
    found, *_ = problems.in_rounds(problem, x, y, estimator, TX, 1, **fields)
    assert problems.distance(problems.moved(x, expected), problems.moved(x, found)) < LIMIT
