"""What the loop promises beside the numbers: ledger, clocks, files, and how it ends."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.ordering import methods, orders
from tests.own_parts import gate
from tests.rounds import problems

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
        (
            {"local": "stepped", "cluster": {"num_workers": 9}},
            r"num_workers = 9.*8 cpu device.*use_cpu_workers\(9\)",
        ),
    ],
)
def test_fields_that_fit_cannot_use_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        problems.train(32, **{"epochs": 1, **fields})


def test_parameters_that_are_not_floating_point_are_refused():
    weights = {"a": np.ones(2, np.float32), "b": np.ones(2, np.int32)}
    with pytest.raises(ValueError, match=r"params\['b'\] has dtype int32"):
        problems.fit(problems.given()[0], weights, epochs=1)


@pytest.mark.parametrize("sharing", ["shared", "private"])
@pytest.mark.parametrize("num_examples", [1, 9, 61])
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
    fields = {"quota": {"max_microbatches": 5}, "cluster": cluster, "epochs": 3}
    result = problems.train(num_examples, data={"sharing": sharing}, **fields)
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
    result = problems.train(61, epochs=2, data={"sharing": sharing}, gate=gate.after(3))
    left = [sum(line["quotas"]) - sum(line["microbatches_done"]) for line in result.history]
    assert sum(left) > 0
    if sharing == "shared":  # a pass ends whole, not in crumbs
        assert min(sum(line["quotas"]) for line in result.history) >= 4
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


def test_a_replay_repeats_what_a_gate_did(tmp_path):
    gated = problems.train(61, epochs=2, gate=gate.after(3), workdir=tmp_path)
    again = problems.train(61, epochs=2, replay=str(tmp_path / "metrics.jsonl"))
    np.testing.assert_array_equal(again.params, gated.params)


def test_the_virtual_clock_tells_the_emulated_times(tmp_path):
    cluster = EMULATED | {"overhead_secs": 0.5}
    result = problems.train(203, epochs=3, quota="equal", cluster=cluster, workdir=tmp_path)
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
    result = problems.train(203, epochs=4, cluster=EMULATED | {"overhead_secs": 0.5})
    full = [line for line in result.history if line["full"]]
    assert full[0]["quotas"] == [2, 2, 2, 2]
    round_secs = [line["round_secs"] for line in full[2:]]
    assert round_secs.count(4.5) >= len(round_secs) - 2  # but for the guard's look at equal split


def test_emulated_workers_sleep_to_their_times():
    cluster = {"num_workers": 2, "secs_per_microbatch": (0.02, 0.04)}
    result = problems.train(32, epochs=1, quota="equal", cluster=cluster)
    # A sleep never ends early; how late it ends is the machine's affair.
    assert np.all(np.array(result.history[0]["compute_secs"]) >= [0.08, 0.16])


def test_schedules_count_examples_and_not_rounds():
    """64 examples in rounds of at most 8 microbatches of 4: the nominal round is 32 examples."""
    optimizer = hetjax.scale_by_progress(lambda progress: jnp.where(progress < 2.0, 0.0, 1.0))
    result = problems.train(optimizer=optimizer, epochs=1)
    weights = problems.initial_weights(np.float32)
    np.testing.assert_array_equal(result.params, weights)
    assert result.state.progress_rounds.tolist() == [2.0] * 4
    assert not np.array_equal(problems.train(optimizer=optimizer, epochs=2).params, weights)


@pytest.mark.parametrize("begun", [2.0**24, 2.0**25 - 2])
def test_progress_goes_on_where_float32_has_no_next_number(begun):
    state = problems.train(epochs=1).state
    state = state._replace(progress_rounds=np.full(4, begun, np.float32))
    found = problems.train(epochs=50, init_state=state).state
    assert found.progress_rounds.tolist() == [np.float32(begun + 100)] * 4


SENT = {"random_reshuffling": 6, "pair_balance": 6, "d_grab": 6 + 6, "d_grab_exact": 6 + 3 * 16}


@pytest.mark.parametrize("name", SENT)
def test_bytes_sent_are_those_of_the_sums_and_of_the_order(name):
    """Copies of all workers round a ring, 2 · 3; of 16 pairs a worker sends three quarters."""
    result = problems.train(epochs=1, ordering=name)
    assert result.history[0]["bytes_sent"] == SENT[name] * problems.given()[1].nbytes


def test_a_workdir_belongs_to_one_configuration(tmp_path):
    for _ in range(2):
        problems.train(32, epochs=2, workdir=tmp_path)
    with pytest.raises(ValueError, match=r"another configuration \(epochs: 2 there, 1 here\)"):
        problems.train(32, epochs=1, workdir=tmp_path)


def test_more_workers_than_devices_are_played(capsys):
    result = problems.train(epochs=1, cluster={"num_workers": 9})
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
            problems.fit(Broken(), problems.given()[1], epochs=1, data={"feed": feed})


def test_an_evaluation_stops_the_run_clock():
    def slow_metrics(weights, batch):
        losses = problems.softmax_loss(weights, batch, None)
        jax.debug.callback(lambda: time.sleep(0.5), ordered=True)
        return {"loss": losses}

    data, weights = problems.given()
    result = problems.fit(data, weights, epochs=2, eval_source=data, metrics_fn=slow_metrics)
    summary = result.summary
    assert summary["wall_secs"] - summary["train_secs"] >= 1.0
    secs = sum(line["round_secs"] for line in result.history)
    assert secs == pytest.approx(summary["train_secs"])
