"""What a report says of the update: its norms, its learning rate, the parameters after it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests import promotion
from tests.rounds import problems

QUOTAS = {"policy": "static", "proportions": (4, 3, 1, 0)}
pytestmark = pytest.mark.usefixtures("float64")
LOCALS = ("stepped", "fused", "virtual")
RATE = 0.3
RING = {"name": "d_psgd", "graph": "ring"}


def cluster(local):
    speeds = {"secs_per_microbatch": (1.0,) * 4, "clock": "virtual"} if local == "virtual" else {}
    return {"num_workers": 4, **speeds}


def run(local, *, optimizer=None, callbacks=(), dtype=np.float64, **fields):
    optimizer = optimizer or optax.sgd(RATE, momentum=0.9)
    fields = {"epochs": 2, "quota": QUOTAS, "local": local, "cluster": cluster(local), **fields}
    given = problems.given(64, dtype)
    return problems.fit(*given, optimizer=optimizer, callbacks=callbacks, **fields)


@pytest.mark.parametrize("local", LOCALS)
def test_norms_are_those_of_the_update_that_was_made(local):
    """Of SGD with momentum: w' = w - u, m' = 0.9 m + g, u = RATE m'."""
    seen = []
    result = run(local, callbacks=[lambda report: seen.append((report, report.params()))])
    before, momentum = problems.initial_weights(), 0
    assert len(seen) == len(result.history) == 4
    for report, after in seen:
        update = after - before
        gradient = -update / RATE - 0.9 * momentum
        assert report.update.update_norm == pytest.approx(np.linalg.norm(update), rel=1e-12)
        assert report.update.grad_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-10)
        before, momentum = after, -update / RATE
    np.testing.assert_array_equal(before, result.params)
    assert result.history[-1]["grad_norm"] == pytest.approx(seen[-1][0].update.grad_norm, rel=1e-8)


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_the_gradient_is_measured_before_it_is_clipped(local):
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(RATE))
    line = run(local, optimizer=clipped, epochs=1).history[0]
    assert line["grad_norm"] > 0.01
    assert line["update_norm"] == pytest.approx(RATE * 1e-3, rel=1e-8)


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_gossiping_workers_tell_their_mean(local):
    """Before the first round replicas are equal: what each adds is what it moves by."""
    fields = {"local": local, "quota": QUOTAS, "cluster": cluster(local), "reducer": RING}
    with problems.run(optimizer=optax.sgd(RATE), **fields) as gossip:
        state, report = gossip.round(gossip.init())
        moved = np.asarray(state.train.params) - problems.initial_weights()
        norms = np.linalg.norm(moved, axis=(1, 2))
        assert report.read().quotas[3] == 0
        assert norms[3] == pytest.approx(0, abs=1e-14)
        assert len(set(norms.round(6))) == 4
        assert report.read().update.update_norm == pytest.approx(norms[:3].mean(), rel=1e-10)
        assert report.read().update.grad_norm == pytest.approx(norms[:3].mean() / RATE, rel=1e-10)


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_the_learning_rate_is_told_where_the_state_has_it(local):
    def told(**fields):
        return run(local, dtype=np.float32, **fields).history

    def rate(progress):
        return 0.2 / (1.0 + jnp.asarray(progress, jnp.float32))

    by_progress = told(optimizer=hetjax.scale_by_progress(rate))
    assert [line["learning_rate"] for line in by_progress] == pytest.approx(
        [0.2, 0.1, 0.2 / 3, 0.05], rel=1e-6
    )
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    rates = [line["learning_rate"] for line in told(optimizer=injected)]
    assert rates == pytest.approx([0.2, 0.1, 0.2 / 3, 0.05], rel=1e-6)
    assert "learning_rate" not in told(optimizer=optax.sgd(0.1), epochs=1)[0]
    groups = {"a": hetjax.scale_by_progress(0.1), "b": hetjax.scale_by_progress(0.2)}
    several = optax.partition(groups, "a")
    assert told(optimizer=several, epochs=1)[0]["grad_norm"] > 0


def test_a_round_without_weight_moves_nothing():
    """The optimiser is not asked either, which would let the weights decay, and count."""

    def weightless(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, rng)
        return losses, jnp.zeros_like(losses)

    seen, optimizer = [], promotion.promoting(optax.adamw(RATE))
    callback = lambda report: seen.append((report.update.update_norm, report.update.grad_norm))  # noqa: E731
    result = run("stepped", optimizer=optimizer, loss_fn=weightless, callbacks=[callback])
    assert seen == [(0.0, 0.0)] * 4
    np.testing.assert_array_equal(result.params, problems.initial_weights())
    assert int(result.state.opt_state[0].count[0]) == 0


def test_bfloat16_norms_are_summed_in_float32():
    params = {"a": np.zeros((300, 7), jnp.bfloat16), "b": np.zeros((3,), np.float32)}
    data = {"x": np.ones((8, 1), np.float32)}

    def loss_fn(params, batch, rng):
        total = 0.01 * params["a"].astype(jnp.float32).sum() + params["b"].sum()
        return total * batch["x"][:, 0]

    fields = {"epochs": 1, "microbatch_size": 8, "budget": 1, "cluster": {"num_workers": 1}}
    result = problems.fit(data, params, loss_fn=loss_fn, optimizer=optax.sgd(1.0), **fields)
    each = float(jnp.asarray(0.01, jnp.bfloat16))
    assert result.history[0]["grad_norm"] == pytest.approx(np.sqrt(2100 * each**2 + 3), rel=1e-6)


def test_parameters_are_asked_for_while_the_callback_runs():
    kept = []
    result = run("stepped", callbacks=[kept.append])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(result.params))
    with pytest.raises(ValueError, match=r"report\.params: this round is past"):
        kept[0].params()


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_a_callback_sees_the_mean_of_gossiping_replicas(local):
    seen = []
    result = run(local, reducer=RING, callbacks=[lambda report: seen.append(report.params())])
    np.testing.assert_allclose(seen[-1], result.params, rtol=1e-12)


def test_a_loop_of_ones_own_asks_the_run():
    with problems.run() as stepped:
        _, report = stepped.round(stepped.init())
        assert report.read().update.grad_norm > 0
        with pytest.raises(ValueError, match=r"run\.params\(state\)"):
            report.read().params()
