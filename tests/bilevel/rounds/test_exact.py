"""The hypergradient of unequal workers is that of one device, whatever the quotas are.

Where weights depend on x or y, rounds take the quotient rule at the sums of all workers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax.quota
from hetjax import bilevel
from hetjax.bilevel import per_example
from tests.bilevel.rounds import problems

pytestmark = pytest.mark.usefixtures("float64")
UNEQUAL = hetjax.quota.static(proportions=(7.0, 1.0, 0.0, 12.0))
TX = optax.sgd(0.2, momentum=0.5)
LIMIT = 1e-12
PROBLEMS = {"constant": problems.PROBLEM, "weighing": problems.WEIGHING}


def by_hand(problem):
    """Each loss as a scalar, the quotient over all examples; with rows of all examples."""

    def scalar(loss):
        def mean(x, y, batch):
            losses, weights = loss(per_example.plain(x), y, batch)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        return mean

    return bilevel.Bilevel(*map(scalar, problem))


@functools.cache
def alone(name, steps, weights="constant"):
    problem, *others = problems.given(name, problem=PROBLEMS[weights])
    problem = by_hand(problem) if weights == "weighing" else problem
    return problems.alone(problem, *others, TX, problems.whole(), steps)


def compared(name, weights="constant", steps=2, **fields):
    problem, x, y, estimator = problems.given(name, problem=PROBLEMS[weights])
    expected_x, expected_y, info = alone(name, steps, weights)
    got_x, got_y, got_info, rounds = problems.in_rounds(
        problem, x, y, estimator, TX, steps, **{"quota": UNEQUAL, **fields}
    )
    assert problems.distance(problems.moved(x, expected_x), problems.moved(x, got_x)) < LIMIT
    assert problems.distance(expected_y, got_y) < LIMIT
    np.testing.assert_allclose(got_info["upper_loss"], info.upper_loss, rtol=LIMIT)
    assert not np.allclose(jax.tree.leaves(x)[-1], jax.tree.leaves(got_x)[-1])  # it moved
    return rounds


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# An estimator sees no weights: it gets the answers to its requests. The last three ask for all
# there is: losses, gradients of each level, products and tangents.
@pytest.mark.parametrize(
    ("name", "local", "weights"),
    [
        *(slow(name, "fused", "constant") for name in (*problems.KINDS, "forward")),
        ("cg", "fused", "weighing"),
        ("forward", "virtual", "weighing"),
        ("reverse", "stepped", "weighing"),
    ],
)
def test_unequal_quotas_give_what_one_device_gives(name, local, weights):
    compared(name, weights, local=local)


def test_adaptive_quotas_of_workers_of_unequal_speed_give_the_same():
    speeds = (1.0, 2.0, 4.0, 8.0)
    cluster = {"num_workers": 4, "secs_per_microbatch": speeds, "clock": "virtual"}
    rounds = compared("cg", steps=4, workers=None, cluster=cluster, quota="adaptive")
    products = [line.quotas for what, _, line in rounds if what.kind is bilevel.Kind.PRODUCTS]
    assert products[-1][0] > products[-1][-1]  # the fast one does more, in held batches too


def test_padding_changes_nothing():
    compared("reverse", microbatch_size=16, workers=8, local="stepped", quota="equal", steps=1)


@pytest.mark.parametrize("name", ["value_gap", "cg"])
def test_small_batches_are_those_of_the_order(name):
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


# --- Private shards: what is minimised ---


def test_private_shards_give_what_one_device_gives():
    fields = {"data": {"sharing": "private"}, "lower": {"budget": 22}, "upper": {"budget": 16}}
    compared("cg", steps=1, workers=2, local="fused", quota="equal", **fields)


def of_shards(problem, weighting, share):
    """Scalars of a batch with an axis of shards, leaves `[W, B, ...]`."""

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
    [(name, "shard_mean") for name in ("cg", "forward")]
    + [("value_gap", "shard"), ("cg", "example")],
)
def test_private_shards_descend_what_their_weighting_says(name, weighting):
    """A shard of three quarters, of which four examples are done, and one of a quarter, two."""
    _, x, y, estimator = problems.given(name, problem=problems.WEIGHING)
    problem, x = problems.without_rows(problems.WEIGHING), {"ridge": x["ridge"]}
    of_upper, of_lower = problems.sources()
    sets = {k: v[:24] for k, v in of_upper.items()}, {k: v[:32] for k, v in of_lower.items()}
    fields = {"data": {"sharing": "private", "weighting": weighting}, "local": "virtual"}
    fields |= {"quota": hetjax.quota.static(proportions=(3.0, 1.0)), "workers": 2, "budget": 3}
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
    problem, x = problems.without_rows(problem), {"ridge": x["ridge"]}
    with problems.run_of(problem, x, y, estimator, TX, workers=2, local="virtual") as run:
        return run.step(run.init())[1].bytes_sent


def test_constant_weights_send_no_more_and_others_two_gradients_for_one():
    constant = sent(problems.PROBLEM, "value_gap")
    in_x = 2 * 2 * 2 * 8  # of both workers: two gradients of the lower level in x, and the loss
    assert sent(problems.WEIGHING, "value_gap") == 2 * constant - in_x  # its weights depend on y
