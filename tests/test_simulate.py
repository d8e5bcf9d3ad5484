"""The simulator of rounds: against a slow loop, training itself, and known figures."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from hetjax import quota, simulate
from hetjax.cluster import emulate
from hetjax.topology import gossip, graphs, links
from tests.rounds import problems

LINK = links.LinkModel(0.25, 1000.0)
PARAM_BYTES = 500
GOSSIPING = ("d_psgd", "d_psgd", "matcha")


def worker_round(ends, closes, drop):
    """(microbatches done, seconds) of one worker whose quota ends at `ends`."""
    done, secs = 0, 0.0
    for place, end in enumerate(ends):
        begins = ends[place - 1] if place else -np.inf
        if drop and end > closes:
            return done, closes
        if not drop and begins >= closes:
            return done, secs
        done, secs = done + 1, end
    return done, secs


TRIGGERS = ["none", "deadline", "first", "quorum"]  # which the slow loop knows


def closing_time(gate, ends):
    """From the times of all workers, a list of lists."""
    if gate["trigger"] == "none":
        return np.inf
    if gate["trigger"] == "deadline":
        return gate["deadline_secs"]
    if gate["trigger"] == "first":
        return min(times[-1] for times in ends if len(times))
    return sorted(end for times in ends for end in times)[gate["quorum"] - 1]


def exchanges(schedule, graph, round, num_workers):
    """(whom each worker receives from, messages each sends, messages one after another)."""
    if schedule is None and isinstance(graph, graphs.PeriodicGraph):
        phase = graph.phases[round % len(graph.phases)]
        senders = [{int(phase[i])} - {i} for i in range(num_workers)]
    elif schedule is None:
        senders = [set(graph.neighbours(i).tolist()) for i in range(num_workers)]
    if schedule is None:
        return senders, [len(s) for s in senders], max(len(s) for s in senders)
    active = schedule.active(round)
    senders = [
        {int(p[i]) for p, used in zip(schedule.partners, active, strict=True) if used} - {i}
        for i in range(num_workers)
    ]
    return senders, [len(s) for s in senders], int(active.sum())


def slow(policy, cluster, num_rounds, *, budget, gate, drop, reducer, wait_for):
    """Worker by worker: lists of (starts after, mean round, waiting, bytes, done) a round."""
    num_workers = cluster.num_workers
    starts = [0.0] * num_workers
    schedule, name, graph = None, reducer["name"], reducer.get("graph")
    if name == "matcha":
        schedule = gossip.matcha(graph, 0.5, seed=cluster.seed)
    state, lines = policy.init(num_workers, budget), []
    for index in range(num_rounds):
        present = cluster.present_at(index)
        quotas, state = policy.assign(state, budget, np.where(present, budget, 0))
        ends = [
            cluster.microbatch_ends(index, i, int(quotas[i])).tolist() for i in range(num_workers)
        ]
        closes = closing_time(gate, ends)
        did = [worker_round(times, closes, drop) for times in ends]
        done, secs = np.array([d for d, _ in did]), np.array([s for _, s in did])
        first = np.array([t[0] if d else np.nan for t, d in zip(ends, done, strict=True)])
        state = policy.observe(state, quota.RoundTimes(done, first, secs))
        if name in ("all_reduce", "ring"):
            copies = [2 * (num_workers - 1) / num_workers] * num_workers
            message = 0.25 * 2 * (num_workers - 1) + copies[0] * PARAM_BYTES / 1000
        else:
            senders, copies, steps = exchanges(schedule, graph, index, num_workers)
            message = steps * (0.25 + PARAM_BYTES / 1000)
        after, waiting, local = [], 0.0, 0.0
        for i in range(num_workers):
            if wait_for == "all":
                met, exchange = max(s + t for s, t in zip(starts, secs, strict=True)), message
            else:
                met = max(starts[j] + secs[j] for j in {i, *senders[i]})
                exchange = copies[i] * (0.25 + PARAM_BYTES / 1000)
            if present[i]:
                waiting += met - starts[i] - secs[i]
                local += met - starts[i]
            after.append(met + exchange)
        mean = np.mean(np.array(after) - np.array(starts))
        starts = after
        lines.append(
            (max(after), mean, waiting / local, round(sum(copies) * PARAM_BYTES), done, secs)
        )
    return lines


@st.composite
def cases(draw):
    num_workers = draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    secs = rng.choice([0.5, 1.0, 2.0, 4.0], num_workers)
    changes = ()
    if num_workers > 2:
        changes = (
            emulate.Change(2, 0, secs_per_microbatch=3.0),
            emulate.Change(3, 1, present=False),
            emulate.Change(6, 1, present=True),
        )
    cluster = emulate.EmulatedCluster(
        tuple(secs),
        draw(st.sampled_from([0.0, 0.5])),
        delay=draw(st.sampled_from(emulate.DELAYS)),
        delay_per=draw(st.sampled_from(emulate.DELAY_PER)),
        changes=changes,
        seed=int(rng.integers(100)),
    )
    wait_for = draw(st.sampled_from(simulate.WAIT_FOR))
    alone = wait_for == "neighbours"
    summing = () if alone else ("all_reduce", "ring")
    reducer = draw(st.sampled_from([*GOSSIPING, *summing]))
    gate = draw(st.sampled_from(["none", "deadline"] if alone else TRIGGERS))
    names = ["ring", "star", "exponential", "random"]
    name = draw(st.sampled_from([*names, "one_peer_exponential"] if reducer == "d_psgd" else names))
    budget = num_workers * draw(st.integers(2, 6))
    options = {
        "quorum": {"quorum": int(rng.integers(1, budget + 1))},
        "deadline": {"deadline_secs": float(rng.exponential(6))},
    }.get(gate, {})
    graph = {} if reducer in summing else {"graph": graphs.make_graph(name, num_workers)}
    policy = draw(st.sampled_from(list(quota.POLICIES)))
    made = quota.static(1 / secs) if policy == "static" else quota.POLICIES[policy]()
    return made, cluster, {
        "budget": budget,
        "gate": {"trigger": gate, **options},
        "drop": draw(st.booleans()),
        "reducer": {"name": reducer, **graph},
        "wait_for": wait_for,
    }  # fmt: skip


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(cases())
def test_rounds_are_those_of_a_slow_loop(case):
    policy, cluster, setting = case
    expected, rounds = slow(policy, cluster, 9, **setting), []
    setting |= {"param_bytes": PARAM_BYTES, "link": LINK, "on_round": rounds.append}
    found = simulate.simulate(policy, cluster, num_rounds=9, **setting)
    for index, (elapsed, mean, waiting, num_bytes, done, secs) in enumerate(expected):
        np.testing.assert_array_equal(rounds[index].microbatches_done, done)
        np.testing.assert_array_equal(rounds[index].compute_secs, secs)
        assert found.elapsed_secs[index] == pytest.approx(elapsed, rel=1e-12)
        assert found.round_secs[index] == pytest.approx(mean, rel=1e-9)
        assert found.waiting_fraction[index] == pytest.approx(waiting, rel=1e-9, abs=1e-12)
        assert found.bytes_sent[index] == num_bytes
        assert found.microbatches_done[index] == done.sum()
    done = np.array([line[4] for line in expected])
    np.testing.assert_array_equal(found.worker_microbatches, done.sum(axis=0))
    assert found.microbatches_per_sec == pytest.approx(done.sum() / expected[-1][0])


@pytest.mark.parametrize(
    ("gate", "drop"),
    [
        ({"trigger": "none"}, False),
        ({"trigger": "first"}, True),
        ({"trigger": "quorum", "quorum": 12}, False),
        ({"trigger": "deadline", "deadline_secs": 3.5}, False),
    ],
)
def test_a_training_run_of_the_same_seed_has_the_same_rounds(gate, drop):
    data, weights = problems.classification(203, np.float32), problems.initial_weights(np.float32)
    secs = {"secs_per_microbatch": (1.0, 1.0, 0.5, 2.0), "delay": "shifted_exponential"}
    fields = {"epochs": 2, "microbatch_size": 2, "budget": 16, "seed": 5, "local": "virtual"}
    fields["gate"] = {"in_flight": "drop" if drop else "finish", **gate}
    fields["reducer"] = {"name": "d_psgd", "graph": "ring"}
    run = problems.fit(data, weights, quota="equal", cluster={**secs, "clock": "virtual"}, **fields)
    rounds, fields = [], {"budget": 16, "num_rounds": len(run.history), "gate": gate, "drop": drop}
    fields |= {"reducer": "d_psgd", "param_bytes": weights.nbytes, "on_round": rounds.append}
    found = simulate.simulate("equal", {**secs, "seed": 5}, **fields)
    # No gate closes the round that ends an epoch, and it may be a smaller one.
    full = [line for line in run.history if line["full"] and line["examples_processed"] % 203]
    assert len(full) > 2
    for line in full:
        index = line["round"]
        assert line["microbatches_done"] == rounds[index].microbatches_done.tolist()
        assert line["compute_secs"] == pytest.approx(rounds[index].compute_secs.tolist(), rel=1e-8)
        assert line["local_secs"] == pytest.approx(found.local_secs[index], rel=1e-8)
        assert line["waiting_fraction"] == pytest.approx(found.waiting_fraction[index], rel=1e-7)
        assert line["bytes_sent"] == found.bytes_sent[index]


# --- Known figures, worked out or simulated apart ---


@pytest.mark.parametrize(("drop", "gain"), [(True, 2.03), (False, 1.88)])
def test_gains_under_exponential_delays_are_the_known_ones(drop, gain):
    cluster = emulate.EmulatedCluster((1.0,) * 8, delay="shifted_exponential", delay_per="round")
    common = {"budget": 64, "num_rounds": 1000}
    gated = simulate.simulate("equal", cluster, gate="first", drop=drop, **common)
    blocking = simulate.simulate("equal", cluster, **common)
    found = gated.microbatches_per_sec / blocking.microbatches_per_sec
    assert found == pytest.approx(gain, rel=0.03)
