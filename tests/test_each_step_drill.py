"""The drill of every step: its table is what a worker tells, and it finds what is wrong."""

import concurrent.futures
import json
import socket
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.drills import each_step, each_step_run, each_step_worker
from hetjax import mesh
from hetjax import types as hetjax_types
from hetjax.checkpoints import files as checkpoint_files
from hetjax.comm import elastic, local_carrier, membership, referee_host, shared_sums
from hetjax.comm.referee import Member
from hetjax.records import checkpoint_manager, workdir

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

MESSAGE = np.array([(1, 0.0)], [("x", np.int64), ("host_secs", np.float64)])


class Reached:
    """In the place of a worker: notes which steps it tells."""

    roster = None

    def __init__(self):
        self.steps, self.views, self.ends = set(), [], []

    def note(self, what, *more):
        {"view": self.views, "ends": self.ends}[what].append(more)

    def reach(self, step):
        self.steps.add(step)

    def applied(self):
        pass


def a_round(member, sums, number):
    """As the engine does it."""
    contributed = hetjax_types.Contribution(jnp.ones((1, 2)), *[()] * 5)
    member.begins(number, jnp.zeros(1))
    sums.post(contributed)
    member.allgather(MESSAGE)
    total = sums.total(contributed, np.zeros(4)).sums
    return member, float(total[0, 0]), member.sends_state()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Three threads that are members, and one that joins; what they tell to a worker."""
    is_over, worker, opened, connects = threading.Event(), Reached(), [], socket.socket.connect
    server = local_carrier.Server(tmp_path, referee_host.RefereeHost(60.0, 60.0, outlives=True))
    server.call("found", [Member(seat, seat) for seat in range(3)])

    class Carrier(local_carrier.LocalCarrier):
        def call(self, *args):
            if is_over.is_set():
                raise SystemExit
            return super().call(*args)

    def end(self, code, words):
        raise SystemExit(code)

    def connect(self, address):
        opened.append(self)
        connects(self, address)

    monkeypatch.setattr(membership.MembershipClient, "end", end)
    monkeypatch.setattr(socket.socket, "connect", connect)
    each_step_worker.wrap(worker, monkeypatch.setattr)

    def come(seat):
        carrier = Carrier(tmp_path, seat)
        client = membership.MembershipClient(carrier, Member(seat, seat), seats=4)
        member = elastic.Elastic(client, mesh.make_worker_mesh(1))
        return member, member.sums(jnp.zeros(2))

    with concurrent.futures.ThreadPoolExecutor(5) as threads:

        def rounds(members, number):
            found = list(threads.map(lambda each: a_round(*each, number), members))
            assert all(total == len(m.roster.last.sum) for m, total, _ in found)
            return next((member for member, _, donates in found if donates), None)

        members, state = list(threads.map(come, range(3))), types.SimpleNamespace(rounds_done=0)
        list(threads.map(lambda each: each[0].start_barrier(state), members))
        newcomer = come(3)
        takes, number, donor = threads.submit(newcomer[0].receive_state), 0, None
        while donor is None:
            donor, number = rounds(members, number), number + 1
        yield types.SimpleNamespace(**locals())
        is_over.set()
    server.close()
    for thread in threading.enumerate():
        if thread.name in ("hetjax-beat", local_carrier.THREAD):
            thread.join()
    for each in opened:
        each.close()


def own_steps(*names):
    """Of the table."""
    return {case.step for case in each_step.cases() if case.step.startswith(names)}


ONE_PROCESS = ("line", "save", "launcher", "round: computing")  # the last is told by the loss


def test_every_step_of_a_round_is_told_by_a_worker(run, monkeypatch):
    run.donor.send_state({"a": np.ones(4), "b": np.ones(4)}, {})
    assert run.takes.result()[0].keys() == {"a", "b"}
    everyone = [*run.members, run.newcomer]
    for number, most in enumerate((1 << 20, 1 << 20, 0), run.number):
        monkeypatch.setattr(shared_sums, "WHOLE_BYTES", most)
        run.rounds(everyone, number)
    others = [m for m, _ in everyone if m is not run.donor]
    waiting = [run.threads.submit(other.outlives_leader) for other in others]
    run.donor.close()
    assert not any(each.result() for each in waiting)
    assert own_steps("") - run.worker.steps == own_steps(*ONE_PROCESS, "lacks")
    assert run.worker.views[-1] == (number, [0, 1, 2, 3], [0, 1, 2, 3])


def test_a_newcomer_that_lacks_a_state_tells_its_steps(run):
    for seat in range(3):
        run.server.call("gone", Member(seat, seat), "was killed")
    with pytest.raises(SystemExit, match=str(membership.LOST)):
        run.takes.result()
    assert own_steps("lacks") <= run.worker.steps
    assert run.worker.ends[-1][0] == membership.LOST


def test_every_step_of_what_is_written_is_told(tmp_path, monkeypatch):
    worker = Reached()
    each_step_worker.wrap(worker, monkeypatch.setattr)
    workdir.Recorder(None, {}, files={}, lines={}).add([], "", 0)
    config = types.SimpleNamespace(checkpoint=types.SimpleNamespace(every_secs=0))
    setup = types.SimpleNamespace(config=config)
    checkpoint_manager.CheckpointManager(None, setup).save({}, {})
    checkpoint_files.seal(tmp_path, 1)
    assert own_steps("line", "save") == worker.steps


def test_the_table_has_each_case_once_and_runs_share_them():
    table = each_step.cases()
    assert len(set(table)) == len(table) >= 243
    runs = each_step.runs_of(table)
    assert sorted(case for run in runs for case in run) == sorted(table)
    assert all(sum(case.at == at for case in run) <= 1 for run in runs for at in (-1, 1))


VIEW = ["view", 1.0, 11, 0, 1, 4, [1, 2], [1]]  # of process 11, start 1: of round 4


def test_what_workers_tell_is_read(tmp_path):
    lines = [["began", 0.5, 11, 0, 1, 2], VIEW, ["ends", 3.0, 11, 0, 1, 75, "was late"]]
    (tmp_path / "told").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = each_step_run.Told(tmp_path / "told").read()
    assert (told.pids, told.newest, told.members()) == ({(0, 1): 11}, (0, 4), [])
    assert (told.ends, told.commits) == ({11: (3.0, 75, "was late")}, {(0, 4): 1.0})
    with (tmp_path / "told").open("a") as file:
        print(json.dumps([*VIEW[:-1], [1, 2]]), file=file)
    assert told.read().different == ["round (0, 4) has two views"]


END = {"params": ["0x1p+0"], "lines": 2, "missing": 0, "duplicated": 0}


@pytest.mark.parametrize(
    ("end", "count", "rounds", "said"),
    [
        ({}, 3, (0, 1), "3 workers ended"),
        ({"params": ["0x2p+0"]}, 4, (0, 1), "that differ"),
        ({"missing": 1}, 4, (0, 1), "missing"),
        ({"duplicated": 1}, 4, (0, 1), "counted twice"),
        ({}, 4, (0, 0), "not each round has one line"),
        ({}, 4, (0,), "not each round has one line"),
        ({}, 4, (0, 1), "in one process"),
    ],
)
def test_a_wrong_end_of_a_run_is_found(end, count, rounds, said, tmp_path, monkeypatch):
    again = types.SimpleNamespace(params=np.array([1 + 1e-10 * (said == "in one process")]))
    monkeypatch.setattr(each_step_worker, "fit", lambda **fields: again)
    (tmp_path / "run").mkdir()
    lines = [f'{{"round": {number}}}\n' for number in rounds]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    for number in range(count):
        told = END | end if number == 1 else END
        (tmp_path / f"result.{number}").write_text(json.dumps(told))
    (wrong,) = each_step.wrongs(tmp_path, 4)
    assert said in wrong
