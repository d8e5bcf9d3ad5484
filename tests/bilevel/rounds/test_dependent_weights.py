"""Weights that depend on x or y: rounds take the quotient rule at the sums of all workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax.quota
from hetjax import bilevel
from hetjax.bilevel import per_example
from hetjax.bilevel.rounds import run as run_lib
from tests.bilevel.rounds import problems

pytestmark = pytest.mark.usefixtures("float64")
UNEQUAL = hetjax.quota.static(proportions=(7.0, 1.0, 0.0, 12.0))
TX = optax.sgd(0.2)
LIMIT = 1e-12


def by_hand(problem):
    """Each loss as a scalar, the quotient over all examples; with rows of all examples."""

    def scalar(loss):
        def mean(x, y, batch):
            losses, weights = loss(per_example.plain(x), y, batch)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        return mean

    return bilevel.Bilevel(*map(scalar, problem))


@functools.cache
def alone(name):
    problem, *others = problems.given(name, problem=problems.WEIGHING)
    return problems.alone(by_hand(problem), *others, TX, problems.whole(), 1)


def compared(name, **fields):
    problem, x, y, estimator = problems.given(name, problem=problems.WEIGHING)
    expected, expected_y, info = alone(name)
    got, got_y, got_info, *_ = problems.in_rounds(
        problem, x, y, estimator, TX, 1, **{"quota": UNEQUAL, **fields}
    )
    assert problems.distance(problems.moved(x, expected), problems.moved(x, got)) < LIMIT
    assert problems.distance(expected_y, got_y) < LIMIT
    np.testing.assert_allclose(got_info["upper_loss"], info.upper_loss, rtol=LIMIT)


# An estimator sees no weights: it gets the answers to its requests. These ask for all there is:
# losses, gradients of each level, products and tangents; `test_exact` has the other estimators.
@pytest.mark.parametrize(
    ("name", "local"), [("cg", "fused"), ("forward", "virtual"), ("reverse", "stepped")]
)
def test_unequal_quotas_give_what_one_device_gives(name, local):
    compared(name, local=local)


# --- Private shards: what is minimised ---


def of_shards(problem, weighting, share):
    """Scalars of a batch with an axis of shards, leaves `[W, B, ...]`, as the table says."""

    def scalar(loss):
        def mean(x, y, batch):
            losses, weights = jax.vmap(functools.partial(loss, x, y))(batch)
            tops, bottoms = jnp.sum(losses * weights, 1), jnp.sum(weights, 1)
            if weighting == "shard_mean":
                return jnp.sum(share * tops / bottoms)
            return jnp.sum(share * tops) / jnp.sum(share * bottoms)

        return mean

    return bilevel.Bilevel(*map(scalar, problem))


# The quotient is taken by each worker with shard_mean alone, for each kind of request otherwise.
# Else the rules of the requests are the same, and the synchronisation weighs what they add up.
@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        ("value_gap", "shard"),
        ("cg", "example"),
        ("cg", "shard_mean"),
        ("forward", "shard_mean"),
    ],
)
def test_private_shards_descend_what_their_weighting_says(name, weighting):
    """A shard of three quarters, of which four examples are done, and one of a quarter, two."""
    _, x, y, estimator = problems.given(name, problem=problems.WEIGHING)
    problem, x = problems.without_rows(problems.WEIGHING), {"ridge": x["ridge"]}
    of_upper, of_lower = problems.sources()
    sets = {k: v[:24] for k, v in of_upper.items()}, {k: v[:32] for k, v in of_lower.items()}
    fields = {
        "data": {"sharing": "private", "weighting": weighting},
        "workers": 2,
        "local": "virtual",
        "quota": hetjax.quota.static(proportions=(3.0, 1.0)),
        "microbatch_size": 2,
        "budget": 3,
    }
    got, _, _, rounds = problems.in_rounds(problem, x, y, estimator, TX, 1, sets=sets, **fields)
    stacks = {}
    for level, data in zip(("upper", "lower"), sets, strict=True):
        done = [d for what, d, _ in rounds if what.level == level and what.is_new]
        assert {tuple(d.quotas) for d in done} == {(2, 1)}
        # The smaller part twice, so that both are of one length.
        ids = [
            np.stack([d.microbatches(0).ravel(), np.tile(d.microbatches(1).ravel(), 2)])
            for d in done
        ]
        assert np.min(ids) >= 0
        stacks[level] = bilevel.Stack({k: v[np.stack(ids)] for k, v in data.items()})
    share = np.array([2 / 3, 1 / 3] if weighting == "example" else [3 / 4, 1 / 4])
    scalar = of_shards(problem, weighting, share)
    expected, *_ = problems.alone(scalar, x, y, estimator, TX, bilevel.Batches(**stacks), 1)
    assert problems.distance(problems.moved(x, expected), problems.moved(x, got)) < LIMIT


# --- What it costs ---


def sent(problem, name):
    """Bytes of an outer step, of which no row of x is a part."""
    _, x, y, estimator = problems.given(name)
    of_upper, of_lower = problems.sources()
    with run_lib.BilevelRun(
        problems.without_rows(problem),
        {"ridge": x["ridge"]},
        y,
        estimator,
        TX,
        upper_source=of_upper,
        lower_source=of_lower,
        workers=2,
        local="virtual",
        microbatch_size=2,
        loss_over="microbatch",
    ) as run:
        return run.step(run.init())[1].bytes_sent


def test_constant_weights_send_no_more_and_others_two_gradients_for_one():
    constant = sent(problems.PROBLEM, "value_gap")
    in_x = 2 * 2 * 2 * 8  # of both workers: two gradients of the lower level in x, and the loss
    assert sent(problems.WEIGHING, "value_gap") == 2 * constant - in_x  # its weights depend on y
