"""The drill of every step: its table is what a worker tells, and its checker finds wrong traces."""

import base64
import concurrent.futures
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.drills import each_step, each_step_traces, each_step_worker
from experiments.drills.each_step_traces import Event
from hetjax import mesh
from hetjax import types as hetjax_types
from hetjax.checkpoints import files as checkpoint_files
from hetjax.comm import elastic, membership
from hetjax.comm.membership import Member, MembershipView
from hetjax.records import checkpoint_manager, workdir


class Reached:
    """In the place of a worker: notes which steps it tells."""

    def __init__(self, start):
        self.incarnation, self.steps, self.number, self.joins = start, set(), 0, False
        self.last = MembershipView(0, (), (), 0)

    def note(self, *given, **more):
        pass

    def reach(self, step, **more):
        self.steps.add(step)


def a_round(member, number):
    """As the engine does it, of two numbers."""
    contributed = hetjax_types.Contribution(jnp.ones((1, 2)), *[()] * 5)
    sums = member.sums(jnp.zeros(2))
    member.begins(number, jnp.zeros(1))
    sums.post(contributed)
    member.allgather(np.array([(1,)], [("x", np.int64)]))
    assert sums.total(contributed, np.zeros(4)).sums.tolist() == [[3.0, 3.0]]
    return member.sends_state()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of a place, which nobody closes
def test_every_step_of_the_table_is_told_by_a_worker(tmp_path, monkeypatch):
    """By three threads, of which one joins; `round: computing` is told by the loss."""
    (tmp_path / "board").mkdir()
    (tmp_path / "roll").write_bytes(bytes([1] * 4))
    worker = Reached(0)
    each_step_worker.wrap(worker, monkeypatch.setattr)

    def come(start):
        at = membership.MembershipClient(
            tmp_path, start, start, seats=4, founders=3, heartbeats=tmp_path
        )
        return elastic.Elastic(at, mesh.make_worker_mesh(1))

    members = [come(start) for start in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda member: member.start_barrier(), members))
        newcomer = come(3)
        newcomer.roster.ask()
        donates = list(threads.map(lambda member: a_round(member, 0), members))
        members[donates.index(True)].send_state({"a": np.ones(1), "b": np.ones(1)}, {})
    assert newcomer.receive_state()[0].keys() == {"a", "b"}
    workdir.Recorder(None, {}, files={}, lines={}).add([], "", 0)
    config = types.SimpleNamespace(checkpoint=types.SimpleNamespace(every_secs=0))
    checkpoint_manager.CheckpointManager(None, types.SimpleNamespace(config=config)).save({}, {})
    checkpoint_files.seal(tmp_path / "board", 1)
    table = each_step.cases()
    assert len(set(table)) == len(table) >= 200
    assert {case.step for case in table} - worker.steps == {"round: computing"}


def numbers(*found):
    return base64.b64encode(np.array(found, float)).decode()


A, B, C = Member(0, 0), Member(1, 1), Member(0, 2)
DECISIONS = [
    MembershipView(0, (A, B), (A, B), 0),
    MembershipView(1, (A, B), (B, C), 1),  # A was killed when it was ready
    MembershipView(2, (C, B), (B, C), 1),
]


def a_round_of(member, decision, at):
    number = decision.number
    rows = [np.array([m.incarnation + 0.5, number]) for m in decision.sum]
    total = numbers(*np.sum(rows, axis=0))
    yield Event("written", number, at, {"content": numbers(member.incarnation + 0.5, number)})
    yield Event("ready", number, at, {})
    if decision.donor == member.incarnation:
        yield Event("set", number, at, {"decision": decision})
    yield Event("adopted", number, at, {"decision": decision})
    yield Event("applied", number, at, {"sum": decision.sum, "content": total})


@pytest.fixture
def traces():
    """Two begin; one is killed in round 1, and the next of its seat is in round 2."""
    at = {m: [list(a_round_of(m, d, float(d.number))) for d in DECISIONS] for m in (A, B, C)}
    handing = Event("handing", 1, 1.5, {})
    taken = Event("taken", 1, 1.6, {"decision": DECISIONS[1]})
    return {
        0: at[A][0] + at[A][1][:2],
        1: [*at[B][0], *at[B][1], handing, *at[B][2]],
        2: [taken, *at[C][2]],
    }


def wrongs(traces, killed=None):
    killed = {0: 0.9} if killed is None else killed
    return each_step_traces.wrongs(traces, killed=killed, patience=1.5)


def changed(events, name, number, **more):
    (index,) = [k for k, e in enumerate(events) if (e.name, e.number) == (name, number)]
    events[index] = events[index]._replace(more=events[index].more | more)


def without(events, *names):
    events[:] = [event for event in events if (event.name, event.number) not in names]


OTHER = DECISIONS[2]._replace(donor=2)
WRONG = {  # what is said, and how traces of a right run become wrong
    "round 2 has 2 decisions": lambda t: changed(t[2], "adopted", 2, decision=OTHER),
    "start 1 applied round 2, of which nothing was decided": lambda t: [
        without(events, ("set", 2), ("adopted", 2)) for events in t.values()
    ],
    "decided was": lambda t: changed(t[1], "applied", 1, sum=(B,)),
    "start 2 applied round 2: not the sum of the contributions": lambda t: changed(
        *(t[2], "applied", 2), content=numbers(4.0, 5.0)
    ),
    "not the sum": lambda t: changed(t[2], "applied", 2, content=numbers(5.5, 6.0)),  # C twice
    "that nobody wrote": lambda t: without(t[0], ("written", 1)),
    "counts start 0, which was not ready": lambda t: without(t[0], ("ready", 1)),
    "0 is in round 2, and no member of it": lambda t: t[0].extend(a_round_of(A, DECISIONS[2], 2.0)),
    "that nobody handed on": lambda t: without(t[1], ("handing", 1)),
    "start 1: begins with ready 0": lambda t: t[1].insert(0, t[1].pop(1)),
    "applied 1 after set 1": lambda t: without(t[1], ("adopted", 1)),
    "start 2: written 2 after applied 2": lambda t: t[2].extend(t[2][-4:]),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_trace_is_found(traces, said):
    assert wrongs(traces) == []
    WRONG[said](traces)
    assert [wrong for wrong in wrongs(traces) if said in wrong], wrongs(traces)


def test_who_lives_is_left_out_after_the_patience_alone(traces):
    said = ["start 0 lives and is left out of round 1 early"]
    assert wrongs(traces, killed={}) == wrongs(traces, killed={0: 1.1}) == said
    late = {start: [e._replace(at=2 * e.at) for e in events] for start, events in traces.items()}
    assert wrongs(late, killed={}) == []
