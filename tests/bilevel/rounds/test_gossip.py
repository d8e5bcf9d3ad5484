"""A value gap of workers that gossip: each has its own y, z and x, by a slow reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel, quota, topology
from tests.bilevel.rounds import problems

RATE, OUTER_RATE, LAM, STEPS = 0.05, 0.2, 4.0, 2


@functools.cache
def sums(loss):
    """Jitted `(sum of w l, sum of w)` of all examples, each as often as `times f[N]` says."""

    def both(x, y, data, times):
        losses, weights = loss(x, y, data)
        return jnp.sum(losses * weights * times), jnp.sum(weights * times)

    return jax.jit(both)


@functools.cache
def gradient(loss, wrt):
    """Jitted, of a worker's `(sum w l - L sum w) / divisor`."""

    def total(x, y, data, times, mean_loss, divisor):
        top, bottom = sums(loss)(x, y, data, times)
        return (top - mean_loss * bottom) / divisor

    return jax.jit(jax.grad(total, "xy".index(wrt)))


def reference(x, y, rounds, matrix, before_update, outer_steps, num_workers, problem, weighting):
    """Replicas of y, z and x as lists; each request by hand, in the order of the estimator.

    A worker descends `(sum w l - L sum w) / divisor`, L the mean loss that divides it. A quarter of
    all examples is nominal.
    """
    data = dict(zip(("upper", "lower"), problems.sources(), strict=True))
    requests = iter(rounds)

    def own_sums(level, wrt, xs, ys):
        """(the next round's gradients, one of each worker)."""
        what, done, _ = next(requests)
        assert (what.level, what.wrt) == (level, (wrt,))
        loss = getattr(problem, level)
        rows = [done.microbatches(worker).reshape(-1) for worker in range(num_workers)]
        num = len(data[level]["targets"])
        times = [np.bincount(ids[ids >= 0], minlength=num).astype(float) for ids in rows]
        own = [sums(loss)(*of, data[level], t) for *of, t in zip(xs, ys, times, strict=True)]
        counts = np.sum(times, axis=1)
        tops, bottoms = map(np.array, zip(*own, strict=True))
        scales = {"shard": 1 / counts, "example": np.ones(num_workers), "shard_mean": 1 / bottoms}
        scale = scales[weighting]
        mean_weight = np.sum(scale * bottoms) / np.sum(scale * counts)
        mean_loss = np.sum(scale * tops) / np.sum(scale * bottoms)
        divisors = {
            "shard": counts * mean_weight,
            "example": np.full(num_workers, np.sum(counts) / num_workers) * mean_weight,
            "shard_mean": bottoms,
        }
        means = tops / bottoms if weighting == "shard_mean" else np.full(num_workers, mean_loss)
        given = zip(xs, ys, times, means, divisors[weighting], strict=True)
        return [
            jax.device_get(gradient(loss, wrt)(x, y, data[level], *others))
            for x, y, *others in given
        ]

    def each(function, *lists):
        return [jax.tree.map(function, *trees) for trees in zip(*lists, strict=True)]

    def mix(trees):
        def of(row):
            return lambda *leaves: sum(a * b for a, b in zip(row, leaves, strict=True))

        return [jax.tree.map(of(row), *trees) for row in matrix]

    def stepped(values, gradients, rate):
        moved = each(lambda v, g: v - rate * g, values, gradients)
        if not before_update:
            return mix(moved)
        return each(lambda m, b, a: m + (a - b), mix(values), values, moved)

    xs, ys = [x] * num_workers, [y] * num_workers
    zs = ys
    for _ in range(outer_steps):
        for _ in range(STEPS):
            zs = stepped(zs, own_sums("lower", "y", xs, zs), RATE)
        for _ in range(STEPS):
            of_f = own_sums("upper", "y", xs, ys)
            of_g = own_sums("lower", "y", xs, ys)
            ys = stepped(ys, each(lambda u, low: (u + LAM * low) / LAM, of_f, of_g), RATE)
        of_y = (own_sums(level, "x", xs, ys) for level in ("upper", "lower"))
        parts = (*of_y, own_sums("lower", "x", xs, zs))
        xs = stepped(xs, each(lambda u, a, b: u + LAM * (a - b), *parts), OUTER_RATE)
    return xs, ys


@pytest.mark.parametrize(
    ("name", "local", "weights", "weighting"),
    [
        ("matcha", "fused", "of x and y", "shard"),
        ("d_psgd", "virtual", "constant", "shard"),
        ("d_psgd", "virtual", "of x and y", "example"),
        ("d_psgd", "virtual", "of x and y", "shard_mean"),
    ],
)
def test_replicas_are_those_of_the_reference(float64, name, local, weights, weighting):
    of_weights = {"constant": problems.PROBLEM, "of x and y": problems.WEIGHING}
    problem = problems.without_rows(of_weights[weights])
    x, y = problems.start()
    x = {"ridge": x["ridge"]}
    make = {"d_psgd": topology.d_psgd, "matcha": topology.matcha}[name]
    reducer = make(graph="complete") if name == "d_psgd" else make(graph="ring", budget=1.0)
    estimator = bilevel.value_gap(bilevel.descent(optax.sgd(RATE)), STEPS, multiplier=LAM)
    fields = {"local": local, "reducer": reducer, "data": {"weighting": weighting}}
    fields["quota"], asked = quota.static(proportions=(3.0, 1.0, 2.0, 2.0)), []
    with problems.run_of(problem, x, y, estimator, optax.sgd(OUTER_RATE), **fields) as run:
        state = run.init()
        for _ in range(2):
            state, step = run.step(state)
            asked += [(each.what, each.report.done, None) for each in step.asked]
        mixing = run.setup.methods.reducer.mixing
        matrix = np.asarray(mixing.gossip.matrix(np.ones(len(mixing.gossip.partners), bool)))
        got_x, got_y = (
            jax.tree.map(np.asarray, jax.device_get(t)) for t in (state.x, state.kept.y)
        )
        assert step.bytes_sent > 0
    xs, ys = reference(x, y, asked, matrix, name == "d_psgd", 2, 4, problem, weighting)
    for got, expected in ((got_x, xs), (got_y, ys)):
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
        assert problems.distance(stacked, got) < 1e-12
    assert np.ptp(got_y["slope"], axis=0).max() > 1e-6  # the replicas do differ


def test_rows_of_examples_stay_alike_with_gossip(float64):
    outer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(9.0))
    problem, x, y, estimator = problems.given("value_gap")
    with problems.run_of(problem, x, y, estimator, outer, local="fused", reducer="d_psgd") as run:
        state, _ = run.step(run.init())
        rows = np.asarray(state.x["weight"].values)
        assert np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
        assert np.all(rows[0] != x["weight"].values)


def test_a_worker_that_does_nothing_stays_where_it_is(float64):
    """Its momentum too; what it says of F is no part of what is told."""
    x, y = problems.start()
    x = {"ridge": x["ridge"]}
    lower = bilevel.descent(optax.sgd(RATE, momentum=0.9))
    estimator, tx = bilevel.value_gap(lower, 1, multiplier=LAM), optax.sgd(OUTER_RATE, momentum=0.9)
    gone = [{"round": 0, "worker": 0, "present": False}]
    fields = {"cluster": {"num_workers": 3, "changes": gone}, "workers": None, "quota": "equal"}
    fields |= {"local": "virtual", "reducer": "d_psgd"}  # mixes before the step; all begin alike
    with problems.run_of(problems.without_rows(), x, y, estimator, tx, **fields) as run:
        state, step = run.step(run.init())
        info = run.own_row(step.info)
        moments = jax.device_get((state.opt, state.kept.opt))
    rows = jax.device_get({"x": state.x, "y": state.kept.y})
    for leaf, began in zip(jax.tree.leaves(rows), jax.tree.leaves({"x": x, "y": y}), strict=True):
        np.testing.assert_allclose(leaf[0], began, rtol=1e-14)
        assert np.all(abs(leaf[1] - began) > 1e-6)
    for leaf in jax.tree.leaves(moments):
        if leaf.ndim > 1 or leaf.dtype.kind == "f":
            assert not np.any(leaf[0])
    losses = []
    for worker in (1, 2):
        of_worker = {name: leaf[worker] for name, leaf in rows["y"].items()}
        found, weights = problems.without_rows().upper(x, of_worker, problems.sources()[0])
        losses.append(np.average(found, weights=weights))
    assert min(losses) * 0.9 < info["upper_loss"] < max(losses) * 1.1
