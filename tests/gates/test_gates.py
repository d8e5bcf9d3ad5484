"""Gates: the threads' form against the virtual clock's, the ledger, and runs that use them."""

import itertools
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from hetjax import gates
from tests.gates import interleavings
from tests.own_parts import gate as own_part
from tests.rounds import problems


@st.composite
def gated_rounds(draw):
    num_workers = draw(st.integers(1, 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    quotas = rng.integers(0, 7, num_workers)
    secs = rng.exponential(size=(num_workers, 6))
    ends = np.cumsum(np.ceil(secs) if draw(st.booleans()) else secs, axis=1)  # whole: many ties
    trigger = draw(st.sampled_from(["none", "first", "quorum", "deadline"]))
    quorum, deadline_secs = int(rng.integers(1, 4 * num_workers + 1)), rng.exponential(4)
    options = interleavings.options_of(trigger, quorum, float(np.ceil(deadline_secs)))
    return trigger, ends, quotas, options


@hypothesis.given(gated_rounds())
def test_the_threads_form_and_the_virtual_clocks_agree(case):
    trigger, ends, quotas, options = case
    done = interleavings.play(trigger, ends, quotas, **options)
    gate = gates.GATES[trigger](**options)
    closing = gates.close(gate, ends, quotas)
    np.testing.assert_array_equal(closing.microbatches_done, done)
    last = [ends[w, d - 1] if d else 0.0 for w, d in enumerate(done)]
    np.testing.assert_array_equal(closing.compute_secs, last)
    assert closing.round_secs == max(last)
    both = gates.close(gate, np.stack([ends, ends + 1]), np.stack([quotas, quotas]))
    np.testing.assert_array_equal(both.microbatches_done[0], done)  # leading axes


@pytest.mark.parametrize(
    ("trigger", "options", "done", "secs", "dropped", "drop_secs"),
    [
        ("none", {}, [4, 4, 4], 16, [4, 4, 4], 16),
        ("first", {}, [4, 2, 1], 4, [4, 2, 1], 4),  # what would begin at 4 is not begun
        ("quorum", {"quorum": 4}, [3, 2, 1], 4, [3, 1, 0], 3),
        ("quorum", {"quorum": 12}, [4, 4, 4], 16, [4, 4, 4], 16),
        ("deadline", {"deadline_secs": 2.5}, [3, 2, 1], 4, [2, 1, 0], 2.5),
    ],
)
def test_what_gates_leave_done(trigger, options, done, secs, dropped, drop_secs):
    ends = np.arange(1, 5) * np.array([[1.0], [2.0], [4.0]])
    gate = gates.GATES[trigger](**options)
    finish = gates.close(gate, ends, np.full(3, 4))
    assert (finish.microbatches_done.tolist(), finish.round_secs) == (done, secs)
    drop = gates.close(gate, ends, np.full(3, 4), drop=True)
    assert (drop.microbatches_done.tolist(), drop.round_secs) == (dropped, drop_secs)


def test_no_example_is_lost_or_doubled_whatever_closes_rounds_and_whoever_dies():
    runs = [interleavings.random_run(seed) for seed in range(400)]
    assert sum(count for count, _, _ in runs) > 2000
    assert {(missing, duplicated) for _, missing, duplicated in runs} == {(0, 0)}


def test_a_gate_counts_what_threads_tell_at_the_same_time():
    gate = gates.begin(gates.quorum(8 * 500))
    gate.begin(np.full(8, 500))
    barrier = threading.Barrier(8)

    def work(worker):
        barrier.wait()
        for done in range(1, 501):
            assert gate.is_open()
            gate.finished(worker, done)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not gate.is_open()


@pytest.mark.parametrize("trigger", ["first", "quorum", "deadline"])
@pytest.mark.parametrize("num_examples", [203, 256, 301])
def test_an_epoch_does_not_end_in_crumbs(trigger, num_examples):
    """A round holds half a budget, however much gates returned before; blocking rounds too."""
    gate = {"trigger": trigger, **interleavings.options_of(trigger, 10, 2.5)}
    cluster = {"secs_per_microbatch": (1,) * 4, "clock": "virtual", "delay": "exponential"}
    data = problems.classification(num_examples, np.float32)
    result = fit(data=data, epochs=3, local="virtual", gate=gate, quota="equal", cluster=cluster)
    ends = {line["epoch"]: line for line in result.history}
    assert len(ends) == 3
    for line in ends.values():  # all of them done
        assert line["microbatches_done"] == line["quotas"]
    assert min(sum(line["quotas"]) for line in result.history) >= 8
    assert result.summary["gate"]["returned_fraction"] > 0.05


DATA, WEIGHTS = problems.classification(203, np.float32), problems.initial_weights(np.float32)
SPEEDS = (0.01, 0.01, 0.01, 0.04)
WALL = {"secs_per_microbatch": SPEEDS}
VIRTUAL = {**WALL, "clock": "virtual"}
GATES = {
    "first": {"trigger": "first"},
    "quorum": {"trigger": "quorum", "quorum": 9},
    "deadline": {"trigger": "deadline", "deadline_secs": 0.025},
}


def fit(data=DATA, **fields):
    return problems.fit(data, WEIGHTS, **{"budget": 16, **fields})


def gated(name, **fields):
    return fit(epochs=2, gate=GATES[name], quota="equal", **{"cluster": VIRTUAL, **fields})


@pytest.mark.parametrize("name", GATES)
def test_runs_on_the_virtual_clock_are_what_the_gate_says(name):
    runs = [gated(name, local=local) for local in ("stepped", "virtual")]
    for one, other in zip(runs[0].history, runs[1].history, strict=True):
        assert one["microbatches_done"] == other["microbatches_done"]
        assert one["local_secs"] == other["local_secs"]
    np.testing.assert_allclose(runs[0].params, runs[1].params, rtol=1e-5)
    lines = runs[0].history
    full = [line for line in lines if sum(line["quotas"]) == 16]
    assert full[0]["microbatches_done"] == ([4, 4, 4, 1] if name == "first" else [3, 3, 3, 1])
    assert full[0]["local_secs"] == pytest.approx(0.04)
    summary = runs[0].summary
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["examples_processed"] == 2 * 203
    assert summary["gate"]["returned_fraction"] > 0.1
    assert "fraction_of_optimum" not in summary  # that of a round of whole quotas


@pytest.mark.parametrize("name", GATES)
def test_threads_on_the_wall_clock_close_rounds_early(name):
    result = gated(name, cluster=WALL)
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    assert result.summary["gate"]["returned_fraction"] > 0
    assert all(done >= 1 for line in result.history for done in line["microbatches_done"][:1])
    closed = [
        line["microbatches_done"]
        for line, after in itertools.pairwise(result.history)
        if sum(line["quotas"]) == 16 and line["epoch"] == after["epoch"]  # no gate closes the last
    ]
    if name == "quorum":  # nine, and what the three others may have in flight
        assert all(9 <= sum(done) <= 12 for done in closed)
    if name == "deadline":  # whatever else the machine does
        assert all(done[3] == 1 and max(done) <= 3 for done in closed)


@pytest.mark.slow
def test_a_replay_of_a_gated_run_repeats_it(tmp_path):
    first = gated("first", cluster=WALL, workdir=tmp_path)
    again = gated("first", cluster=WALL, replay=str(tmp_path / "metrics.jsonl"))
    np.testing.assert_array_equal(first.params, again.params)
    for one, other in zip(first.history, again.history, strict=True):
        assert one["microbatches_done"] == other["microbatches_done"]


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ({"trigger": "deadline", "deadline_secs": 0.005}, r"deadline_secs: got 0\.005, .* 0\.01"),
        ({"trigger": "first", "in_flight": "drop"}, "gate.in_flight: got 'drop'"),
    ],
)
def test_messages(gate, message):
    with pytest.raises(ValueError, match=message):
        fit(cluster=WALL, gate=gate)


# --- Gates of one's own ---


class NeverAnew(own_part.Counting):
    _done = 0

    def begin(self, quotas):
        pass


of_four = own_part.after(4).closes_at


def own_gate(live=own_part.Counting, closes_at=of_four):
    return gates.Gate(lambda board, clock: live(4, board), closes_at)


DISAGREE = {
    "at another number": own_gate(closes_at=lambda ends, quotas: of_four(ends, quotas) * 2),
    "not begun anew": own_gate(live=NeverAnew),
}
NO_TIMES = {
    "NaN": lambda ends, quotas: np.full(ends.shape[:-2], np.nan),
    "one for each worker": lambda ends, quotas: ends.max(axis=-1),
    "none": lambda ends, quotas: None,
}


@pytest.mark.parametrize("local", ["virtual", "stepped"])
@pytest.mark.parametrize("name", DISAGREE)
def test_a_gate_whose_two_forms_disagree_is_refused_when_a_run_is_made(name, local):
    with pytest.raises(ValueError, match=r"gate: two forms of '.*own_gate.*' disagree"):
        fit(gate=DISAGREE[name], local=local)


@pytest.mark.parametrize("name", NO_TIMES)
def test_a_gate_that_returns_no_time_is_refused_and_does_not_hang(name):
    with pytest.raises(ValueError, match=r"own_gate.*': closes_at\(ends, quotas\) returned"):
        fit(gate=own_gate(closes_at=NO_TIMES[name]), local="virtual")


def test_a_gate_that_becomes_wrong_later_is_refused_then():
    """The made rounds are right; what it says of a later one is looked at all the same."""
    calls, is_running = itertools.count(), threading.Event()

    def closes_at(ends, quotas):
        return of_four(ends, quotas) if next(calls) < 12 else np.nan

    class Maybe(own_part.Counting):
        def is_open(self):
            return "no" if is_running.is_set() else super().is_open()

    def told(line):
        is_running.set()

    with pytest.raises(ValueError, match=r"closes_at\(ends, quotas\) returned float64\[\] nan"):
        fit(gate=own_gate(closes_at=closes_at), local="virtual")
    with pytest.raises(ValueError, match=r"own_gate.*: is_open\(\) returned 'no'"):
        fit(gate=own_gate(Maybe), callbacks=[told])


def test_what_is_in_flight_cannot_all_be_given_up_for_ever():
    """A gate that closes before any microbatch ends, with `drop`: no round would do anything."""
    zeros = lambda ends, quotas: np.zeros(ends.shape[:-2])  # noqa: E731
    gate = {"trigger": gates.Gate(lambda board, clock: Closed(), zeros), "in_flight": "drop"}
    with pytest.raises(ValueError, match=r"drops all of .* in 1000 rounds"):
        fit(gate=gate, cluster=VIRTUAL, local="virtual")


class Closed(gates.AlwaysOpen):
    def is_open(self):
        return False
