"""Losses, optimisers, metrics and endings of every kind that users bring."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems

EMULATED = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}


def regression(num_examples=61, dtype=np.float32):
    x = np.random.default_rng(0).normal(size=(num_examples, 3)).astype(dtype)
    return {"x": x, "y": (x @ np.array([1, -2, 3], dtype)).astype(dtype)}


def squared(weights, batch, rng):
    return (batch["x"] @ weights - batch["y"]) ** 2


def fit(examples=None, /, *, weights=None, **fields):
    weights = np.zeros(3, np.float32) if weights is None else weights
    fields = {"loss_fn": squared, "optimizer": optax.sgd(0.05), "epochs": 2, **fields}
    return problems.fit(regression() if examples is None else examples, weights, **fields)


def test_padding_leaves_a_loss_finite_that_zeros_would_not():
    def distance(weights, batch, rng):
        return (jnp.linalg.norm(batch["x"] * weights[None], axis=-1) - batch["y"]) ** 2

    result = fit(weights=np.ones(3, np.float32), loss_fn=distance)  # 61 examples: one is alone
    assert np.isfinite(result.params).all()
    assert result.summary["examples_skipped"] == 0


def test_gradients_of_half_precision_parameters_are_summed_in_single():
    def linear(weights, batch, rng):  # gradients 256, then 0.5 a microbatch: lost in bfloat16
        return weights[0] * batch["g"].astype(weights.dtype)

    data = {"g": np.array([512.0] + [1.0] * 63, np.float32)}
    seen = []

    def watch(updates, state, params=None):
        jax.debug.callback(lambda u: seen.append(float(u[0])), updates)
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), watch)
    fields = {"microbatch_size": 2, "budget": 32, "cluster": {"num_workers": 1}, "epochs": 1}
    fit(data, weights=np.zeros(1, jnp.bfloat16), loss_fn=linear, optimizer=optimizer, **fields)
    jax.effects_barrier()
    exact = jnp.bfloat16((512 + 63) / 64)
    assert float(exact) in seen


def test_progress_that_nobody_gives_is_asked_for():
    optimizer = hetjax.scale_by_progress(0.1)
    with pytest.raises(ValueError, match="scale_by_progress: pass progress="):
        optimizer.update(np.ones(2), optimizer.init(np.ones(2)))


def test_evaluations_come_as_often_as_asked():
    """And settings may be NumPy's numbers."""
    result = fit(eval_source=regression(), epochs=np.int64(5), eval_every=2)
    epochs = [line["epoch"] for line in result.history if "eval" in line]
    assert epochs == [1, 3, 4]  # every second one, and the last
    cluster = {"secs_per_microbatch": np.ones(2) / 1e4}
    assert fit(cluster=cluster, epochs=1).summary["num_workers"] == 2
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"jax_enable_x64 is True by a `with` block"),
    ):
        fit()


@pytest.mark.parametrize(
    ("metrics_fn", "message"),
    [
        (lambda p, b: {"loss": jnp.mean(b["y"])}, r"'loss' as float32\[\]"),
        (lambda p, b: b["y"], "must be a dict"),
    ],
)
def test_metrics_of_a_wrong_form_are_refused_before_training(metrics_fn, message):
    with pytest.raises(ValueError, match=message):
        fit(eval_source=regression(), metrics_fn=metrics_fn)


def test_the_best_parameters_need_a_finite_loss():
    data, values = regression(), iter([np.nan, 3.0, 1.0, 2.0])

    def metrics(weights, batch):
        level = jax.pure_callback(
            lambda: np.float32(metrics.level), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return {"loss": level + 0 * batch["y"]}

    metrics.level = 0.0

    def advance(line):
        if line.round % 2 == 0:  # two rounds an epoch: the evaluation of this one is to come
            metrics.level = next(values)

    result = fit(data, eval_source=data, metrics_fn=metrics, callbacks=[advance], epochs=4)
    assert result.summary["best_test_loss"] == 1.0
    errors = lambda w, b: {"err": squared(w, b, None)}  # noqa: E731
    other = fit(data, eval_source=data, metrics_fn=errors, epochs=2)
    assert "best_test_err" not in other.summary
    np.testing.assert_array_equal(other.best_params, other.params)


@pytest.mark.slow
def test_per_example_keys_work_in_make_train_step():
    def noisy(weights, batch, rngs):
        return squared(weights, batch, None) * (1 + jax.vmap(jax.random.normal)(rngs))

    ids, given = np.arange(8).reshape(2, 2, 2), (regression(8), np.zeros(3, np.float32))
    fields = {"loss_fn": noisy, "per_example_rng": True}
    step, *given = problems.own_step(ids, *given, optax.sgd(0.1), **fields)
    state, _, _ = step(*given, np.array([2, 1], np.int32), jax.random.key(0))
    assert np.isfinite(state.params).all()
    assert np.abs(state.params).max() > 0


def test_a_nonfinite_run_hands_over_the_state_it_kept():
    """Of the round before, where the first microbatch of the second is not finite."""
    data = regression(64)
    before = fit(data, epochs=1, max_rounds=1)
    data["x"][np.random.default_rng((0, 0)).permutation(64)[32]] = np.nan
    with pytest.raises(hetjax.NonFiniteError) as raised:
        fit(data, epochs=1)
    result = raised.value.result
    assert result.summary["interrupted"]
    np.testing.assert_array_equal(result.params, before.params)
    assert np.abs(result.params).max() > 0


@pytest.mark.parametrize("local", ["virtual", "stepped"])
def test_parameters_that_are_not_finite_are_found_by_a_worker_that_has_examples(local):
    with pytest.raises(hetjax.NonFiniteError, match=r"microbatch 0 .*\(examples \[\d"):
        fit(optimizer=optax.sgd(1e38), budget=1, local=local)


def test_each_epoch_has_random_keys_of_its_own():
    def noise_alone(weights, batch, rng):
        return jax.random.normal(rng, batch["y"].shape) + 0 * weights[0]

    result = fit(regression(32), loss_fn=noise_alone, budget=8, epochs=3)
    losses = [line["loss"] for line in result.history]
    assert len(set(losses)) == 3


def test_an_interrupted_run_can_be_replayed(tmp_path):
    stop = problems.press_ctrl_c(lambda line: line.round == 1)
    cut = fit(callbacks=[stop], epochs=5, workdir=tmp_path)
    again = fit(epochs=5, replay=str(tmp_path / "metrics.jsonl"))
    np.testing.assert_array_equal(again.params, cut.params)
    assert again.summary["interrupted"]
    assert again.summary["rounds"] == cut.summary["rounds"]


def test_a_rerun_that_fails_leaves_no_files_of_the_run_before(tmp_path):
    fit(workdir=tmp_path)

    def fail(line):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        fit(workdir=tmp_path, callbacks=[fail])
    rounds = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == rounds == 1


@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_no_thread_outlives_a_run(feed):
    before = set(threading.enumerate())
    fit(data={"feed": feed})
    begun = [t for t in threading.enumerate() if t.name.startswith("hetjax") and t not in before]
    for thread in begun:
        thread.join(timeout=120)
    assert not [thread.name for thread in begun if thread.is_alive()]


def test_absent_workers_do_not_count_as_waiting():
    cluster = EMULATED | {"changes": ({"round": 0, "worker": 3, "present": False},)}
    result = fit(quota={"policy": "equal"}, cluster=cluster, epochs=1, microbatch_size=2, budget=6)
    assert result.history[0]["quotas"] == [2, 2, 2, 0]
    assert result.history[0]["waiting_fraction"] == pytest.approx((4 + 2 + 0) / 3 / 6)


def test_examples_that_nobody_reads_are_told():
    cluster = EMULATED | {"changes": ({"round": 0, "worker": 1, "present": False},)}
    result = fit(regression(80), data={"sharing": "private"}, cluster=cluster)
    assert result.summary["examples_missing"] == 0
    assert result.summary["examples_never_processed"] == 20


def test_a_slow_worker_keeps_its_shard_in_private_training():
    cluster = {"secs_per_microbatch": (0.001, 0.001, 0.001, 0.008), "clock": "virtual"}
    result = fit(regression(400), data={"sharing": "private"}, cluster=cluster, epochs=8)
    assert all(min(line["quotas"]) >= 1 for line in result.history)
    assert result.summary["examples_never_processed"] == 0
    # A pass that ends makes a round smaller; it gives nobody more than the policy did.
    slow = [line["quotas"][3] for line in result.history[2:]]
    assert max(slow[20:]) <= 2
    assert min(sum(line["quotas"]) for line in result.history) < 8


@pytest.mark.parametrize("policy", ["equal", "adaptive"])
@pytest.mark.parametrize("budget", [2, 3])
def test_no_private_shard_is_left_out_by_a_small_budget(policy, budget):
    fields = {"quota": policy, "microbatch_size": 2, "budget": budget, "epochs": 3}
    fields["cluster"] = {"secs_per_microbatch": (1, 2, 4), "clock": "virtual"}
    fields["data"] = {"sharing": "private"}
    if budget < 3:
        with pytest.raises(ValueError, match=f"budget: got {budget}, must be at least 3"):
            fit(regression(37), **fields)
    else:
        assert fit(regression(37), **fields).summary["examples_never_processed"] == 0


def test_a_worker_that_joins_later_needs_a_microbatch_for_its_shard():
    changes = tuple({"round": r, "worker": 3, "present": r > 0} for r in (0, 4))
    fields = {"cluster": EMULATED | {"changes": changes}, "data": {"sharing": "private"}}
    with pytest.raises(ValueError, match=r"budget: got 3, must be at least 4 .* from round 4 on"):
        fit(budget=3, **fields)


def test_a_trace_of_another_budget_is_refused(tmp_path):
    fit(workdir=tmp_path)
    with pytest.raises(ValueError, match=r"replay: round 0 .* here are 6 microbatches"):
        fit(budget=6, replay=str(tmp_path / "metrics.jsonl"))


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ValueError, match=r"holds a report\.html but no config\.json"):
        fit(workdir=tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"
