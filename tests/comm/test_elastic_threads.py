"""Members of an elastic run, in threads: equal sums to the bit, whoever dies when."""

import concurrent.futures

import numpy as np
import pytest

from hetjax import mesh as mesh_lib
from hetjax import types, wires
from hetjax.comm import (
    allgather_work,
    communicator,
    membership,
    shared_sums,
)
from hetjax.comm.referee import JOINED, Member
from hetjax.liveness import heartbeats
from hetjax.records import workdir
from tests.comm import elastic_program, elastic_threads
from tests.comm.elastic_threads import DeadError, Fault
from tests.launcher import launches

# A thread that beats ends with its member.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
FOUNDERS = 3
NEW = Member(3, 3)


class EndedError(SystemExit):
    """Instead of the end of a process."""


@pytest.fixture(params=["whole", "slices", "outlives", "one adds", "wired slices"])
def begun(request, monkeypatch):
    """Begins a run in threads; `begun(faults, …)` returns it and the members' futures."""
    monkeypatch.setattr(membership, "_BEAT_SECS", 0.01)
    is_large = request.param not in ("whole", "outlives")
    wire = wires.WIRES[-1 if "wired" in request.param else 0]
    monkeypatch.setattr(shared_sums, "WHOLE_BYTES", 0 if is_large else 1 << 20)
    outlives = request.param in ("outlives", "one adds")

    def end(self, code, words):
        raise EndedError((code, words))

    monkeypatch.setattr(membership.MembershipClient, "end", end)
    threads, runs = concurrent.futures.ThreadPoolExecutor(8), []

    def begin(faults=(), founders=FOUNDERS):
        run = elastic_threads.Run(founders, dict(faults), outlives=outlives, wire=wire)
        runs.append(run)
        run.ask("found", run.founders)
        run.start = lambda member: threads.submit(elastic_threads.train, run, member)
        return run, {member: run.start(member) for member in run.founders}

    yield begin
    for run in runs:
        run.close()
    threads.shutdown()


def check(run, futures, *, dead=()):
    """Each round is the same in all that had it, and that of the oracle to the bit."""
    for member, future in futures.items():
        if member in dead:
            assert isinstance(future.exception(60), DeadError)
        else:
            future.result(60)
    assert {state.tobytes() for state in run.states.values()} == {
        next(iter(run.states.values())).tobytes()
    }
    views = {}
    for rounds in run.told.values():
        for number, (view, total, heard, changes) in rounds.items():
            assert views.setdefault(number, view) == view
            np.testing.assert_array_equal(total, run.oracle(view.sum, number))
            assert {int(x) for x in heard["of"]} - {0} == {m.incarnation for m in view.sum} - {0}
            assert changes == [(m.rank, how) for m, how in view.changes]
    assert sorted(views) == list(range(len(views)))
    return [views[number] for number in range(len(views))]


POINTS = [
    ("before", "ready"),
    ("after", "ready"),
    ("", "take"),
    ("before", "has"),
    ("after", "has"),
]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS, ids=" ".join)
def test_where_a_member_dies_the_others_have_equal_sums(point, rank, begun):
    dies = Member(rank, rank)
    run, futures = begun({dies: Fault("dies", *point, 1)})
    run.ends_at = 3
    views = check(run, futures, dead=[dies])
    assert run.happened == {dies}
    assert len(run.states) == FOUNDERS - 1
    assert [m.rank for m in views[-1].sum] == [k for k in range(FOUNDERS) if k != rank]
    (change,) = [change for view in views for change in view.changes]
    assert change == (dies, "was killed")
    if point == POINTS[0] or (
        point == POINTS[2] and not run.outlives
    ):  # else it counts where all the others have it
        assert dies not in views[1].sum


@pytest.mark.parametrize("kind", ["begins", "ready", "has", "beat"])
def test_an_answer_that_is_lost_is_asked_for_again(kind, begun):
    run, futures = begun({Member(0, 0): Fault("loses", "after", kind)})
    run.ends_at = 2
    views = check(run, futures)
    assert run.happened == {Member(0, 0)}
    assert {len(view.sum) for view in views} == {FOUNDERS}


def has_rounds(run, member, count):
    launches.eventually(lambda: len(run.told.get(member, ())) >= count)


@pytest.mark.parametrize("kind", ["", "joins", "holds", "has"])
def test_a_newcomer_takes_a_sum_before_it_contributes(kind, begun):
    """Also where it loses an answer."""
    run, futures = begun({NEW: Fault("loses", "after", kind)})
    has_rounds(run, Member(1, 1), 2)
    futures[NEW] = run.start(NEW)
    has_rounds(run, NEW, 3)
    run.ends_at = 0
    views = check(run, futures)
    first = min(run.told[NEW])
    assert NEW not in views[first].sum
    assert NEW in views[first + 1].sum
    assert (NEW, JOINED) in views[first].changes
    assert NEW in views[first - 1].joining


def test_a_newcomer_that_gets_the_state_of_a_run_that_ends_leaves(begun):
    """It cannot know yet that the others do no further round."""
    founder = Member(0, 0)
    run, futures = begun({founder: Fault("loses", "before", "ready", 0, (NEW, "joins"))}, 1)
    run.ends_at = 0
    with pytest.raises(EndedError, match="came when the run had ended"):
        run.start(NEW).result(60)
    futures[founder].result(60)
    assert list(run.told[founder]) == [0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_its_donor_dies_another_hands_the_state(when, begun):
    run, futures = begun({Member(0, 0): Fault("dies", when, "donated")})
    has_rounds(run, Member(1, 1), 2)
    futures[NEW] = run.start(NEW)
    has_rounds(run, NEW, 3)
    run.ends_at = 0
    views = check(run, futures, dead=[Member(0, 0)])
    assert views[-1].sum == (Member(1, 1), Member(2, 2), NEW)


@pytest.mark.parametrize("kind", ["holds", "has", "ready"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_where_a_newcomer_dies_the_others_go_on(when, kind, begun):
    run, futures = begun({NEW: Fault("dies", when, kind)})
    has_rounds(run, Member(1, 1), 2)
    futures[NEW] = run.start(NEW)
    launches.eventually(lambda: NEW in run.dead)
    has_rounds(run, Member(1, 1), 4 + len(run.told[Member(1, 1)]))
    run.ends_at = 0
    views = check(run, futures, dead=[NEW])
    assert [change for view in views for change in view.changes][-1] == (NEW, "was killed")
    assert {view.sum[:FOUNDERS] for view in views} == {tuple(run.founders)}


def test_a_round_of_newcomers_alone_has_an_empty_sum(begun):
    """All others die when the newcomer has got the state, before they contribute."""
    founder = Member(0, 0)
    run, futures = begun({founder: Fault("dies", "after", "donated", None, (NEW, "holds"))}, 1)
    has_rounds(run, founder, 2)
    futures[NEW] = run.start(NEW)
    has_rounds(run, NEW, 3)
    run.ends_at = 0
    views = check(run, futures, dead=[founder])
    first = min(run.told[NEW])
    assert views[first].sum == ()
    assert views[first].changes == ((founder, "was killed"), (NEW, JOINED))
    assert views[first + 1].sum == (NEW,)


def test_of_an_empty_sum_nobody_tells_what_it_did():
    mesh, none = mesh_lib.make_worker_mesh(1), np.zeros(1)
    alone = communicator.Communicator(2)
    alone.responded = np.zeros(2, bool)
    alone.allgather = lambda messages: np.zeros(2, messages.dtype)
    gather = allgather_work.WorkAllGather(alone, most_signs=0, microbatch_size=1)
    contributed = elastic_threads.contributed(np.zeros(25, np.float32), mesh)
    work = types.Work(none.astype(int), none, none, none.astype(int))
    work, asked, metrics = gather(contributed, work, (1, 2, 3), allgather_work.Request.NOTHING)
    assert work.microbatches_done.tolist() == [0, 0]
    assert (asked, float(metrics.weight_sum)) == (allgather_work.Request.NOTHING, 0.0)


def test_where_nobody_has_the_state_all_end_by_name(begun):
    founder = Member(0, 0)
    run, _ = begun({founder: Fault("dies", "before", "donated")}, 1)
    has_rounds(run, founder, 2)
    with pytest.raises(EndedError, match="finds no worker that has the state of the run"):
        run.start(NEW).result(60)
    assert run.ask("watch", 0)[2] == "lost"


def test_another_state_after_a_round_is_an_error_by_name(begun):
    run, futures = begun()
    run.errs = Member(2, 2)
    for future in futures.values():
        with pytest.raises(RuntimeError, match="worker 2 has another state than worker 0 after"):
            future.result(60)


def test_a_newcomer_is_not_the_first_where_no_founder_is_left():
    class Carrier:
        def call(self, method, *args):
            if method == "enter":
                return (), "run"
            raise SystemExit  # of the thread that beats

    client = membership.MembershipClient(Carrier(), Member(1, 7), seats=4)
    assert (client.is_newcomer, client.is_first) == (True, False)


def test_who_leads_is_busy_while_it_writes_the_end_of_a_run(tmp_path, monkeypatch):
    """Else the others would leave it out, whose patience may be short."""
    phases, at_end = [], []
    at, finish = heartbeats.Heartbeats.at, workdir.Recorder.finish

    def noted(self, phase, *given):
        phases.append(phase)
        at(self, phase, *given)

    def finished(*given):
        at_end.append(phases[-1])
        return finish(*given)

    monkeypatch.setattr(heartbeats.Heartbeats, "at", noted)
    monkeypatch.setattr(workdir.Recorder, "finish", finished)
    elastic_program.fit(epochs=1, workdir=str(tmp_path))
    assert [phase in heartbeats.OWN_WORK for phase in at_end] == [True]
