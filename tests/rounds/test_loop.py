"""What the loop promises beside the numbers: ledger, clocks, files, and how it ends."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.local import gradients
from hetjax.ordering import methods, ordering, orders, pairs
from tests.own_parts import gate
from tests.rounds import problems

LOCAL = ["stepped", "fused", "virtual"]
EMULATED = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"name": "lenet"}}, r"fit: model: .*loss_fn"),
        ({"data": {"num_train": 8}}, r"fit: data\.num_train"),
        ({"epoch": 3}, r"epoch: there is no such field.*'epochs'"),
        (
            {"ordering": methods.d_grab(), "reducer": "d_psgd"},
            r"'d_grab' does not work with .*'d_psgd'.*all_reduce, ring",
        ),
        (
            {
                "ordering": orders.random_reshuffling()._replace(coordinated=True),
                "reducer": {"name": "matcha"},
            },
            r"'given: .*' does not work with .*'matcha'.*all_reduce, ring",
        ),
    ],
)
def test_fields_that_fit_cannot_use_are_refused(fields, message):
    data, weights = problems.classification(32, np.float32), problems.initial_weights(np.float32)
    with pytest.raises(ValueError, match=message):
        problems.fit(data, weights, **{"epochs": 1, **fields})


def test_parameters_that_are_not_floating_point_are_refused():
    data = problems.classification(32, np.float32)
    with pytest.raises(ValueError, match=r"params\['b'\] has dtype int32"):
        problems.fit(data, {"a": np.ones(2, np.float32), "b": np.ones(2, np.int32)}, epochs=1)


@pytest.mark.parametrize("sharing", ["shared", "private"])
@pytest.mark.parametrize("num_examples", [1, 9, 61, 203])
def test_nothing_is_missing_or_doubled_whatever_divides(num_examples, sharing):
    if sharing == "private" and num_examples < 4:
        pytest.skip("fewer examples than workers are refused for private data")
    cluster = EMULATED | {
        "changes": (
            {"round": 1, "worker": 0, "present": False},
            {"round": 2, "worker": 3, "secs_per_microbatch": 0.1},
            {"round": 4, "worker": 0, "present": True},
        )
    }
    result = problems.fit(
        problems.classification(num_examples, np.float32),
        problems.initial_weights(np.float32),
        epochs=3,
        data={"sharing": sharing},
        quota={"max_microbatches": 5},
        cluster=cluster,
    )
    summary = result.summary
    assert (summary["examples_missing"], summary["examples_duplicated"]) == (0, 0)
    assert summary["examples_processed"] >= 3 * num_examples
    assert sum(line["examples"] for line in result.history) == summary["examples_processed"]
    for line in result.history:
        assert all(
            q == 0 for q, here in zip(line["quotas"], line["present"], strict=True) if not here
        )
        assert max(line["quotas"]) <= 5


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_what_a_gate_leaves_over_is_done_later_and_once(sharing):
    result = problems.fit(
        problems.classification(61, np.float32),
        problems.initial_weights(np.float32),
        epochs=2,
        data={"sharing": sharing},
        gate=gate.after(3),
    )
    left = [sum(line["quotas"]) - sum(line["microbatches_done"]) for line in result.history]
    assert sum(left) > 0
    if sharing == "shared":  # a pass ends whole, not in crumbs
        assert min(sum(line["quotas"]) for line in result.history) >= 4
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


def test_a_replay_repeats_what_a_gate_did(tmp_path):
    data = problems.classification(61, np.float32)
    weights = problems.initial_weights(np.float32)
    gated = problems.fit(data, weights, epochs=2, gate=gate.after(3), workdir=tmp_path)
    again = problems.fit(data, weights, epochs=2, replay=str(tmp_path / "metrics.jsonl"))
    np.testing.assert_array_equal(again.params, gated.params)


def _parity():
    """A sign for each pair: + where its first example's id is even. Carries no mathematics."""

    def observe(losses, shared, evidence, microbatch, position, rng):
        def objective(params):
            values, weights = losses(params)
            return values.sum(), weights.sum()

        (loss, weight), grads = jax.value_and_grad(objective, has_aux=True)(shared.params)
        signs = jnp.where(microbatch.example_ids[::2] % 2 == 0, 1, -1).astype(jnp.int8)
        change = jnp.sum(signs * microbatch.example_mask[::2].astype(signs.dtype)).astype(
            jnp.float32
        )
        return (loss, weight), (grads,), change, pairs.join(signs, -signs)

    def coordinate(memory, evidence, axis):
        rank = jax.lax.axis_index(axis)
        flip = jnp.where(rank % 2 == 0, 1, -1).astype(jnp.int8)
        return memory + jax.lax.psum(evidence, axis), flip

    def coordinate_array(memory, evidence):
        flips = 1 - 2 * (jnp.arange(len(memory)) % 2)
        return memory + evidence.sum(), flips.astype(jnp.int8)

    return ordering.Observer(
        init=lambda params: jnp.zeros((), jnp.float32),
        begin_round=jnp.zeros_like,
        observe=observe,
        coordinate=coordinate,
        coordinate_array=coordinate_array,
        new_pass=jnp.zeros_like,
    )


@pytest.mark.parametrize("local", LOCAL)
def test_an_ordering_gets_the_signs_of_realised_pairs(local):
    calls = []
    shuffled = orders.random_reshuffling()

    def place(state, examples, signs):
        calls.append((examples, signs))
        return shuffled.place(state, examples, signs)

    parity = ordering.Ordering(
        shuffled.init, place, make_observer=lambda sizes: _parity(), coordinated=True
    )
    result = problems.fit(
        problems.classification(61, np.float32),
        problems.initial_weights(np.float32),
        epochs=1,
        local=local,
        ordering=parity,
        cluster=EMULATED,
    )
    total = 0
    for (examples, signs), line in zip(calls, result.history, strict=True):
        assert len(signs) == len(examples)
        worker = np.repeat(np.arange(4), 4 * np.array(line["microbatches_done"]))[: len(signs)]
        parity = np.where(examples[::2] % 2 == 0, 1, -1)
        expected = np.repeat(parity, 2)[: len(examples)] * np.where(worker % 2 == 0, 1, -1)
        expected[1::2] *= -1
        np.testing.assert_array_equal(signs, expected)
        total += parity.sum()
    np.testing.assert_array_equal(result.state.memory, [total] * 4)


def test_the_virtual_clock_tells_the_emulated_times(tmp_path):
    result = problems.fit(
        problems.classification(203, np.float32),
        problems.initial_weights(np.float32),
        epochs=3,
        quota={"policy": "equal"},
        cluster=EMULATED | {"overhead_secs": 0.5},
        workdir=tmp_path,
    )
    first = result.history[0]
    assert first["quotas"] == [2, 2, 2, 2]
    assert first["compute_secs"] == [2.5, 4.5, 6.5, 8.5]
    assert first["round_secs"] == first["local_secs"] == 8.5
    assert first["waiting_fraction"] == pytest.approx((6 + 4 + 2) / 4 / 8.5)
    # By hand: 4, 2, 1, 1 microbatches take 4.5, 4.5, 3.5, 4.5 seconds, and nothing is shorter.
    assert result.summary["optimal_round_secs"] == pytest.approx(4.5)
    assert result.summary["fraction_of_optimum"] == pytest.approx(4.5 / 8.5)
    assert result.history[1]["start_secs"] == 8.5
    assert "exchange_secs" not in first
    assert "exchange_secs_mean" not in result.summary


def test_adaptive_quotas_reach_the_optimum_of_the_virtual_clock():
    result = problems.fit(
        problems.classification(203, np.float32),
        problems.initial_weights(np.float32),
        epochs=4,
        cluster=EMULATED | {"overhead_secs": 0.5},
    )
    full = [line for line in result.history if line["full"]]
    assert full[0]["quotas"] == [2, 2, 2, 2]
    round_secs = [line["round_secs"] for line in full[2:]]
    assert round_secs.count(4.5) >= len(round_secs) - 2  # but for the guard's look at equal split


def test_emulated_workers_sleep_to_their_times():
    cluster = {"num_workers": 2, "secs_per_microbatch": (0.02, 0.04)}
    result = problems.fit(
        problems.classification(32, np.float32),
        problems.initial_weights(np.float32),
        epochs=1,
        quota={"policy": "equal"},
        cluster=cluster,
    )
    # A sleep never ends early; how late it ends is the machine's affair.
    assert np.all(np.array(result.history[0]["compute_secs"]) >= [0.08, 0.16])


def test_schedules_count_examples_and_not_rounds():
    data = problems.classification(64, np.float32)
    weights = problems.initial_weights(np.float32)
    seen = []

    def rate(progress):
        return jnp.where(progress < 2.0, 0.0, 1.0)

    def watch(line):
        seen.append(line.round)

    # 64 examples in rounds of at most 8 microbatches of 4: the nominal round is 32 examples.
    result = problems.fit(
        data,
        weights,
        optimizer=hetjax.scale_by_progress(rate),
        epochs=1,
        callbacks=[watch],
    )
    np.testing.assert_array_equal(result.params, weights)
    assert result.state.progress_rounds.tolist() == [2.0] * 4
    moved = problems.fit(data, weights, optimizer=hetjax.scale_by_progress(rate), epochs=2)
    assert not np.array_equal(moved.params, weights)


@pytest.mark.parametrize("begun", [0.0, 2.0**24, 2.0**25 - 2])
def test_progress_goes_on_where_float32_has_no_next_number(begun):
    data = problems.classification(64, np.float32)
    weights = problems.initial_weights(np.float32)
    state = problems.fit(data, weights, epochs=1).state
    state = state._replace(progress_rounds=np.full(4, begun, np.float32))
    found = problems.fit(data, weights, epochs=50, init_state=state).state
    assert found.progress_rounds.tolist() == [np.float32(begun + 100)] * 4


SENT = {"random_reshuffling": 6, "pair_balance": 6, "d_grab": 6 + 6, "d_grab_exact": 6 + 3 * 16}


@pytest.mark.parametrize("name", SENT)
def test_bytes_sent_are_those_of_the_sums_and_of_the_order(name):
    """Copies of all workers round a ring, 2 · 3; of 16 pairs a worker sends three quarters."""
    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    result = problems.fit(data, weights, epochs=1, ordering=name)
    assert result.history[0]["bytes_sent"] == SENT[name] * weights.nbytes


def test_the_best_parameters_are_those_of_the_lowest_evaluation():
    data = problems.classification(64, np.float32)
    weights = problems.initial_weights(np.float32)
    worse = optax.chain(optax.identity(), optax.scale(1.0))  # uphill
    result = problems.fit(data, weights, optimizer=worse, epochs=3, eval_source=data)
    losses = [line["eval"]["test_loss"] for line in result.history if "eval" in line]
    assert losses == sorted(losses)
    assert result.summary["best_test_loss"] == pytest.approx(losses[0], rel=1e-6)
    assert result.summary["test_loss"] == pytest.approx(losses[-1], rel=1e-6)
    mean = float(np.mean(problems.softmax_loss(result.best_params, data, None)))
    assert mean == pytest.approx(losses[0], rel=1e-5)


def test_a_workdir_belongs_to_one_configuration(tmp_path):
    data = problems.classification(32, np.float32)
    weights = problems.initial_weights(np.float32)
    problems.fit(data, weights, epochs=2, workdir=tmp_path)
    problems.fit(data, weights, epochs=2, workdir=tmp_path)
    with pytest.raises(ValueError, match=r"another configuration \(epochs: 2 there, 1 here\)"):
        problems.fit(data, weights, epochs=1, workdir=tmp_path)


def test_a_loss_that_is_no_number_an_example_is_refused():
    data = problems.classification(32, np.float32)
    weights = problems.initial_weights(np.float32)

    def mean_loss(weights, batch, rng):
        return problems.softmax_loss(weights, batch, rng).mean()

    with pytest.raises(ValueError, match=r"returned losses float32\[\].*\[4\].*\.mean\(\)"):
        problems.fit(data, weights, loss_fn=mean_loss, epochs=1)
    with pytest.raises(ValueError, match="tuple of 3"):
        problems.fit(data, weights, loss_fn=lambda w, b, r: (1, 2, 3), epochs=1)


def test_more_workers_than_devices_are_refused_or_played(capsys):
    data = problems.classification(64, np.float32)
    weights = problems.initial_weights(np.float32)
    with pytest.raises(ValueError, match=r"num_workers = 9.*8 cpu device.*use_cpu_workers\(9\)"):
        problems.fit(data, weights, epochs=1, local="stepped", cluster={"num_workers": 9})
    result = problems.fit(data, weights, epochs=1, cluster={"num_workers": 9})
    assert result.summary["clock"] == "virtual"
    assert "local='virtual'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="JAX already runs with 8 CPU") as refused:
        hetjax.use_cpu_workers(9)
    assert refused.value.__suppress_context__  # no chain of traces
    hetjax.use_cpu_workers(8)


def test_a_record_that_cannot_be_read_is_named():
    class Broken:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 13:
                raise OSError("disk on fire")
            return {"x": np.ones(5, np.float32), "y": np.int32(0)}

    for feed in ("resident", "streamed"):
        with pytest.raises(ValueError, match=r"13.*disk on fire"):
            problems.fit(
                Broken(), problems.initial_weights(np.float32), epochs=1, data={"feed": feed}
            )


def test_an_evaluation_stops_the_run_clock():
    data = problems.classification(64, np.float32)

    def slow_metrics(weights, batch):
        losses = problems.softmax_loss(weights, batch, None)
        jax.debug.callback(lambda: time.sleep(0.5), ordered=True)
        return {"loss": losses}

    result = problems.fit(
        data,
        problems.initial_weights(np.float32),
        epochs=2,
        eval_source=data,
        metrics_fn=slow_metrics,
    )
    pauses = result.summary["wall_secs"] - result.summary["train_secs"]
    assert pauses >= 1.0
    assert sum(line["round_secs"] for line in result.history) == pytest.approx(
        result.summary["train_secs"]
    )


def test_gradients_are_summed_in_float32_or_wider(float64):
    empty = gradients.zeros({"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2)})
    assert empty.grad_sum["a"].dtype == jnp.float32
    assert empty.grad_sum["b"].dtype == jnp.float64
