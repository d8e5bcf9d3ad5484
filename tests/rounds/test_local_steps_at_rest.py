"""Where unequal numbers of local steps come to rest, against closed forms."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems

CENTRES, CURVES, COUNTS = [-1.0, 0.0, 0.5, 2.0], [1.0, 0.5, 2.0, 1.5], [8, 4, 2, 1]
SETTLED = 60  # rounds after which all is at rest


def quadratic(params, batch, rng):
    """Of each shard its own, `curve / 2 * (x - centre)^2`."""
    return 0.5 * batch["curve"] * (params[0] - batch["centre"]) ** 2


def taken(curve, count, inner):
    """How much of the way to the centre some steps go, and how far those of gradients of 1."""
    ways = []
    for gradient in (lambda x: curve * x, jnp.ones_like):
        at, begun = jnp.ones(()), inner.init(jnp.zeros(()))
        for _ in range(count):
            moved, begun = inner.update(gradient(at), begun, at)
            at = at + moved
        ways.append(1 - float(at))
    return ways


def at_rest(inner, shares, weights, **options):
    """Where a run on four private quadratics comes to rest."""
    fields = {
        "cluster": {"num_workers": 4},
        "data": {"sharing": "private"},
        "quota": problems.scripted(COUNTS),
        "microbatch_size": 1,
        "budget": sum(COUNTS),
        "local": "virtual",
    }
    num = 8 * sum(shares)
    with problems.run(
        {"x": np.zeros(num)}, np.zeros(1), loss_fn=lambda p, b, r: p[0] + b["x"], **fields
    ) as made:
        shards = made.setup.stream.shards
    data = {"curve": np.zeros(num), "centre": np.zeros(num)}
    for ids, curve, centre in zip(shards, CURVES, CENTRES, strict=True):
        data["curve"][ids], data["centre"][ids] = curve, centre
    far = np.mean([taken(c, n, inner)[0] for c, n in zip(CURVES, COUNTS, strict=True)])
    result = problems.fit(
        data,
        np.zeros(1),
        loss_fn=quadratic,
        optimizer=optax.sgd(1 / far),
        rule=hetjax.local_steps(inner, weights, **options),
        epochs=10_000,
        max_rounds=SETTLED,
        **fields,
    )
    return float(np.asarray(result.params)[0])


def expected(inner, amounts):
    """With `amounts` of each worker, of its part of the way."""
    ways = [taken(c, n, inner) for c, n in zip(CURVES, COUNTS, strict=True)]
    pull = np.array([amounts(*way) for way in ways])
    return float(pull @ CENTRES / pull.sum())


def test_a_plain_mean_is_biased_and_fednova_the_less_the_smaller_the_rate(float64):
    best = np.dot(CURVES, CENTRES) / np.sum(CURVES)
    off = []
    for rate in (0.04, 0.02, 0.01, 0.005):
        inner = optax.sgd(rate)
        plain = at_rest(inner, [1, 1, 1, 1], "uniform")
        assert plain == pytest.approx(expected(inner, lambda way, a: way), abs=1e-10)
        assert at_rest(inner, [1, 1, 1, 1], "loss") == pytest.approx(plain, abs=1e-10)
        nova = at_rest(inner, [1, 1, 1, 1], "fednova")
        assert nova == pytest.approx(expected(inner, lambda way, a: way / a), abs=1e-10)
        off.append(abs(nova - best))
        assert abs(plain - best) > 0.3
    ratios = [b / a for a, b in itertools.pairwise(off)]
    assert ratios == pytest.approx([0.5] * 3, abs=0.05)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fednova_knows_how_far_momentum_goes(nesterov, float64):
    inner = optax.sgd(0.02, momentum=0.9, nesterov=nesterov)
    found = at_rest(inner, [1, 1, 1, 1], "fednova", keep=False)
    assert found == pytest.approx(expected(inner, lambda way, a: way / a), abs=1e-10)
