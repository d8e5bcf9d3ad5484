"""Workers that come and go: real processes under the launcher, killed, stopped, added."""

import concurrent.futures
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax import mesh
from hetjax.comm import double_buffer, membership, state_transfer
from hetjax.comm import elastic as elastic_lib
from hetjax.inputs import arguments, refusals
from tests.comm import elastic_program
from tests.launcher import launches
from tests.launcher.conftest import launch  # noqa: F401

PROGRAM = """
import runpy, sys
sys.argv = ["elastic_program", os.environ["APART"]]
runpy.run_module("tests.comm.elastic_program", run_name="__main__")
"""
WORKERS, ROUNDS = 3, 60


@pytest.fixture
def apart(launch, monkeypatch, tmp_path_factory):  # noqa: F811
    """Starts a run apart; returns its launcher and its workdir."""

    def start(*flags, **fields):
        workdir = tmp_path_factory.mktemp("run")
        fields = {"workdir": str(workdir), "secs": 0.02} | fields
        monkeypatch.setenv("APART", json.dumps(fields))
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        flags = (f"--workers={WORKERS}", "--runtime=apart", "--max_restarts=20", *flags)
        return launch(PROGRAM, *flags), workdir

    return start


def results(launched):
    """What the processes had at the end, by worker."""
    assert launched.end() == 0, launched.text()
    found = [re.search(r"\[(\d+)\] result (.*)", line) for line in launched.out()]
    return {int(match[1]): json.loads(match[2]) for match in found if match}


def lines(workdir):
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def changes(workdir):
    """Who came and went, as the lines have it."""
    return [tuple(each) for line in lines(workdir) for each in line.get("changes", ())]


def after(count, workdir):
    """Waits until a run has so many lines."""
    launches.eventually(lambda: len(lines(workdir)) >= count)


def pid_of(launched, worker):
    """Of the newest start of a worker."""
    found = [re.search(rf"\[{worker}\] pid (\d+)", line) for line in launched.out()]
    return int([match for match in found if match][-1][1])


def ask(launched, flag, of_whom=""):
    """Adds a worker, or removes one."""
    (match,), _ = launched.wait_for(r"--add=(\S+)")
    command = [sys.executable, "-m", "hetjax.launch", f"--{flag}={match[1]}{of_whom}"]
    subprocess.run(command, check=True, cwd=launches.ROOT)


def check_exact(workdir, told, *, seats=WORKERS, **fields):
    """Nothing is missing or doubled, each round has one line, all have the state of one process."""
    count = len(lines(workdir))
    assert [line["round"] for line in lines(workdir)] == list(range(count))
    for before, line in itertools.pairwise(lines(workdir)):
        assert line["start_secs"] == pytest.approx(before["start_secs"] + before["round_secs"])
    assert len({tuple(each["params"]) for each in told.values()}) == 1
    for each in told.values():
        assert (each["missing"], each["duplicated"]) == (0, 0)
        assert (each["rounds"], each["lines"]) == (count, count)
    fields |= {"cluster": {"num_workers": seats}, "replay": str(workdir / "metrics.jsonl")}
    with jax.enable_x64(True):
        again = elastic_program.fit(local="virtual", **fields)
    params = [float.fromhex(x) for x in next(iter(told.values()))["params"]]
    np.testing.assert_allclose(params, again.params, rtol=1e-12)


@pytest.mark.slow
def test_killed_workers_are_replaced_and_nothing_is_lost(apart):
    """The one that leads, too, and one that has joined."""
    launched, workdir = apart(epochs=40)
    for count, worker in enumerate((1, 0, 1)):
        after(5 + len(lines(workdir)), workdir)
        os.kill(pid_of(launched, worker), signal.SIGKILL)
        launched.wait_for(rf"round \d+: worker {worker} joins", 1 + (count == 2))
    told = results(launched)
    assert set(told) == set(range(WORKERS))
    assert [each["leads"] for each in told.values()].count(True) == 1
    launched.wait_for(r"worker \d leads from round")
    check_exact(workdir, told, epochs=40)
    assert changes(workdir) == [(k, what) for k in (1, 0, 1) for what in ("was killed", "joined")]


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
def test_without_who_dies_while_it_starts_the_others_begin_if_not_worker_0(worker, apart):
    launched, workdir = apart("--max_restarts=0", epochs=4)
    launched.wait_for(rf"\[{worker}\] pid \d+")
    os.kill(pid_of(launched, worker), signal.SIGKILL)
    if worker == 0:
        assert launched.end() == 1
        launched.wait_for("worker 0 ended by SIGKILL; no restart is left")
        return
    told = results(launched)
    launched.wait_for(r"the run begins without worker 2: it")
    assert {tuple(line["present"]) for line in lines(workdir)} == {(True, True, False)}
    check_exact(workdir, told, epochs=4)


@pytest.mark.slow
def test_a_worker_that_sleeps_is_left_out_and_begins_anew(apart, monkeypatch):
    monkeypatch.setenv("HETJAX_LATE_SECS", "20")
    launched, workdir = apart(epochs=100)
    after(5, workdir)
    pid = pid_of(launched, 0)
    os.kill(pid, signal.SIGSTOP)
    launched.wait_for(r"worker 0 was late; the others do its part")
    os.kill(pid, signal.SIGCONT)
    launched.wait_for(r"worker 0 joins")
    check_exact(workdir, results(launched), epochs=100)


@pytest.mark.slow
def test_workers_are_added_and_taken_away_while_a_run_goes_on(apart):
    launched, workdir = apart(f"--max_workers={WORKERS + 1}", epochs=60)
    after(5, workdir)
    ask(launched, "add")
    ask(launched, "remove", ":0")
    launched.wait_for(rf"worker {WORKERS} joins")
    launched.wait_for(r"worker 0 left;")
    told = results(launched)
    assert 0 not in told
    assert WORKERS in told
    assert [sum(line["present"]) for line in lines(workdir)][-1] == WORKERS
    check_exact(workdir, told, seats=WORKERS + 1, epochs=60)
    assert {*changes(workdir)} == {(WORKERS, "joined"), (0, "left")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "told", "code"),
    [
        ({"raises_at": 4}, "0 raised ValueError: enough", 1),
        ({"workdir": f"{__file__}/run"}, "0 raised ValueError: workdir '.*' cannot .*Not a", 2),
        ({"rates": [0.02, 0.04, 0.02]}, "1 raised DisagreementError: .* another optimizer than", 2),
    ],
)
def test_a_worker_that_raises_ends_the_run_by_name(fields, told, code, apart):
    launched, _ = apart("--max_restarts=0", epochs=40, **fields)
    assert launched.end() == code
    launched.wait_for(rf"worker {told}")


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"local": "virtual"}, "local: got 'virtual'"),
        ({"data": {"sharing": "private"}}, "data.sharing: got 'private'"),
        ({"data": {"sharing": "process_local"}}, "data.sharing: got 'process_local'"),
        ({"reducer": "d_psgd"}, "reducer.name: got 'd_psgd'"),
        ({"ordering": "pair_balance"}, "ordering.method: got 'pair_balance'"),
    ],
)
def test_what_needs_more_is_refused(fields, first):
    config, parts = arguments.config_of_fields({"budget": 8, "local": "stepped"} | fields)
    with pytest.raises(ValueError, match=re.escape(first)):
        refusals.check_apart(config, parts, one_pass=True)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [("apart", "only the launcher starts such runs"), ("together", "must be joined or apart")],
)
def test_only_the_launcher_starts_such_runs(runtime, message, monkeypatch):
    monkeypatch.setenv("HETJAX_RUNTIME", runtime)
    with pytest.raises(ValueError, match=f"HETJAX_RUNTIME={runtime}.*{message}"):
        membership.of_environment(elastic_lib.Elastic)


def test_a_half_that_was_overwritten_shows_it(tmp_path):
    written = double_buffer.DoubleBuffer(tmp_path / "half", 8, make=True)
    read = double_buffer.DoubleBuffer(tmp_path / "half", 8)
    written.begin(3)[:] = 1
    assert not read.has(3)
    written.end(3)
    assert read.has(3)
    assert read.halves[1].all()
    written.begin(5)
    assert not read.has(3)
    assert not read.has(5)


@pytest.fixture
def places():
    """A place is its process's to the end; those of a test are collected when it is over."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def of_places(test):
    test = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")(test)
    return pytest.mark.usefixtures("places")(test)


def two_of(tmp_path, **fields):
    (tmp_path / "board").mkdir()
    (tmp_path / "roll").write_bytes(bytes([1] * 3))
    fields = {"seats": 2, "founders": 2, "heartbeats": tmp_path} | fields
    at = [membership.MembershipClient(tmp_path, seat, seat, **fields) for seat in (0, 1)]
    return at, [elastic_lib.Elastic(each, mesh.make_worker_mesh(1)) for each in at]


def tell(member, number, state):
    member.turn.number = number
    member.start_barrier()
    member.begins(number, jnp.array([state]))
    return member.allgather(
        np.array([(10 * number + member.roster.incarnation,)], [("x", np.int64)])
    )["x"]


@of_places
def test_who_slept_compares_the_digests_of_its_own_round(tmp_path, monkeypatch):
    """Another member is a round ahead by then, and has told another digest since."""
    at, members = two_of(tmp_path)
    awake, look = threading.Event(), at[1].wait
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: member.start_barrier(), members))
        sleeper = threads.submit(tell, members[1], 0, 1.0)
        launches.eventually((tmp_path / "told.1").exists)
        launches.eventually(lambda: members[1].is_ready(at[1].own))
        monkeypatch.setattr(at[1], "wait", lambda secs: awake.wait(60) and look(secs))
        assert tell(members[0], 0, 1.0).tolist() == [0, 1]
        ahead = threads.submit(tell, members[0], 1, 2.0)
        is_ahead = lambda: members[0].turn.number == 1 and members[0].is_ready(at[0].own)  # noqa: E731
        launches.eventually(is_ahead)
        awake.set()
        assert sleeper.result().tolist() == [0, 1]
        assert tell(members[1], 1, 2.0).tolist() == ahead.result().tolist() == [10, 11]


@of_places
def test_another_decides_where_the_first_sleeps_that_is_ready(tmp_path, monkeypatch):
    """And the first adopts that, when it wakes."""
    at, members = two_of(tmp_path, late_secs=0.2)
    awake, decide = threading.Event(), at[0].decide
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: member.start_barrier(), members))
        monkeypatch.setattr(at[0], "decide", lambda plan: awake.wait(60) and decide(plan))
        sleeper = threads.submit(tell, members[0], 0, 1.0)
        other = threads.submit(tell, members[1], 0, 1.0)
        try:
            assert other.result(timeout=50).tolist() == [0, 1]
        finally:
            awake.set()
        assert sleeper.result().tolist() == [0, 1]
    assert at[0].last == at[1].last
    assert at[0].last.donor == 1


@of_places
def test_what_a_killed_donor_left_half_written_is_put_away(tmp_path):
    _, members = two_of(tmp_path)
    (half := tmp_path / ".state.0.5eed").touch()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for number in range(3):
            assert half.exists()
            list(threads.map(lambda member: tell(member, number, 1.0), members))  # noqa: B023
    assert not half.exists()


@of_places
@pytest.mark.parametrize("is_named", [True, False])
def test_a_newcomer_that_slept_while_it_was_a_member_begins_anew(is_named, tmp_path, monkeypatch):
    """Before it saw that it was named, or before it read the state that it was handed."""
    at, members = two_of(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: member.start_barrier(), members))
    late = membership.MembershipClient(tmp_path, 1, 2, seats=2, founders=2, heartbeats=tmp_path)
    ask, found = late.ask, state_transfer.read

    def ask_and_sleep():
        ask()
        if is_named:
            at[0].decide(membership.MembershipView(0, (at[0].own,), (at[0].own, late.own), 0))
            (tmp_path / "state.0").touch()
        else:
            at[0].forget([late.own])  # as a member does that has decided

    def read(path):
        path.unlink()
        return found(path)

    monkeypatch.setattr(late, "ask", ask_and_sleep)
    monkeypatch.setattr(state_transfer, "read", read)
    monkeypatch.setattr(late, "end", lambda code, words: sys.exit(code))
    with pytest.raises(SystemExit, match=str(membership.LEFT_OUT)):
        elastic_lib.Elastic(late, mesh.make_worker_mesh(1)).receive_state()


@of_places
def test_who_is_asked_to_leave_stays_until_another_has_the_state(tmp_path, monkeypatch):
    at, members = two_of(tmp_path)
    monkeypatch.setattr(at[0], "end", lambda code, words: sys.exit(code))

    def asked(*seats):
        with open(tmp_path / "roll", "r+b") as roll:
            roll.write(
                bytes(membership.ASKED_TO_LEAVE if k in seats else membership.RUNS for k in (0, 1))
            )

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: member.start_barrier(), members))
        asked(0, 1)
        list(threads.map(lambda member: tell(member, 0, 1.0), members))
        assert at[1].decided(0).members == (at[0].own, at[1].own)
        asked(0)
        leaves, stays = (threads.submit(tell, member, 1, 1.0) for member in members)
        with pytest.raises(SystemExit, match=str(membership.REMOVED)):
            leaves.result()
        stays.result()
    decision = at[1].decided(1)  # by either
    assert (decision.members, decision.donor) == ((at[1].own,), at[1].incarnation)
    assert decision.changes == members[1].changes == ((0, "left"),)


def test_digests_tell_states_apart():
    tree = {"a": jnp.arange(7.0), "b": jnp.ones((3, 5), jnp.bfloat16)}
    same = jax.tree.map(jnp.copy, tree)
    assert double_buffer.digest(tree) == double_buffer.digest(same)
    for name in tree:
        other = tree | {name: tree[name].at[-1].multiply(1.01)}
        assert double_buffer.digest(tree) != double_buffer.digest(other)


def test_a_state_is_handed_on_as_it_is(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.asarray(jnp.ones(5, jnp.bfloat16)),
        "c": np.zeros((0, 4), np.int8),
        "d": np.array(2.5),
    }
    state_transfer.write(tmp_path / "state", arrays, {"rounds": 3, "lines": []})
    found, about = state_transfer.read(tmp_path / "state")
    assert about == {"rounds": 3, "lines": []}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(FileNotFoundError):
        state_transfer.write(tmp_path / "none" / "state", arrays, {})
    (tmp_path / "state").write_bytes(b"")
    with pytest.raises(EOFError):
        state_transfer.read(tmp_path / "state")
