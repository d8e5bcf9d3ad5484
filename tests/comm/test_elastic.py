"""Workers that come and go: real processes under the launcher, killed, stopped, added."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.comm import elastic as elastic_lib
from hetjax.comm import membership
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
@pytest.mark.parametrize("keep", [True, False])
def test_steps_of_killed_workers_are_taken_by_the_others(keep, apart):
    """Who comes begins with the leader's inner state, or all begin anew in each round."""
    fields = {"steps": {"keep": keep, "weights": "uniform" if keep else "fednova"}, "epochs": 30}
    launched, workdir = apart("--max_restarts=2", **fields)
    for worker in (1, 0):
        after(5 + len(lines(workdir)), workdir)
        os.kill(pid_of(launched, worker), signal.SIGKILL)
        launched.wait_for(rf"round \d+: worker {worker} joins")
        if keep:
            told = "as a copy of the leader's"
            launched.wait_for(f"what the rule keeps for worker {worker} begins {told}")
    told = results(launched)
    if keep:
        assert len({tuple(each["params"]) for each in told.values()}) == 1
        assert {(each["missing"], each["duplicated"]) for each in told.values()} == {(0, 0)}
    else:
        check_exact(workdir, told, **fields)


@pytest.mark.slow
def test_steps_go_on_to_the_bit_where_all_are_started_again(
    launch,  # noqa: F811
    monkeypatch,
    tmp_path_factory,
):
    """Workers that are joined, of which one is killed, and a run that is left alone."""
    found, directory = [], tmp_path_factory.mktemp("runs")
    for name, killed in (("killed", True), ("whole", False)):
        fields = {"workdir": str(directory / name), "secs": 0.01, "quota": "equal", "steps": {}}
        fields |= {"checkpoint": {"every_rounds": 5}, "epochs": 8}
        monkeypatch.setenv("APART", json.dumps(fields))
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        launched = launch(PROGRAM, f"--workers={WORKERS}", "--max_restarts=1")
        if killed:
            after(8, directory / name)
            os.kill(pid_of(launched, 1), signal.SIGKILL)
        told = results(launched)
        assert {bool(each["resumed"]) for each in told.values()} == {killed}
        assert {(each["missing"], each["duplicated"]) for each in told.values()} == {(0, 0)}
        found.append({tuple(each["params"]) for each in told.values()})
    assert found[0] == found[1]
    assert len(found[0]) == 1


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
def test_a_run_that_is_at_its_end_is_started_again(apart, monkeypatch):
    """No round is left; the workers meet all the same, before the first of them ends."""
    fields = {"epochs": 1, "secs": 0.0, "checkpoint": {"every_rounds": 5}}
    first, workdir = apart(**fields)
    before = results(first)
    restarted = f"os.environ['HETJAX_ATTEMPT'] = '1'\n{PROGRAM}"
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", restarted)
    again, _ = apart("--max_restarts=0", **fields, workdir=str(workdir))
    told = results(again)
    assert set(told) == set(range(WORKERS))
    assert {tuple(told[k]["params"]) for k in told} == {tuple(before[0]["params"])}


@pytest.mark.slow
def test_who_leads_is_killed_when_all_is_written(apart, monkeypatch):
    dies = """
from hetjax.comm import elastic
tells = elastic.Elastic.close
def close(self):
    tells(self)
    if self.roster.leads:
        os.kill(os.getpid(), 9)
elastic.Elastic.close = close
"""
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", dies + PROGRAM)
    launched, workdir = apart("--max_restarts=0", epochs=1)
    told = results(launched)
    assert set(told) == set(range(1, WORKERS))
    assert len(lines(workdir)) == 10


@pytest.mark.slow
def test_a_worker_that_sleeps_is_left_out_and_begins_anew(apart):
    launched, workdir = apart("--late_secs=20", epochs=100)
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


@pytest.mark.parametrize("runtime", ["apart", "together"])
def test_only_the_launcher_starts_such_runs(runtime, monkeypatch):
    monkeypatch.setenv("HETJAX_RUNTIME", runtime)
    with pytest.raises(ValueError, match=f"HETJAX_RUNTIME={runtime}: must be joined or apart, and"):
        membership.of_environment()


def test_digests_tell_states_apart():
    tree = {"a": jnp.arange(7.0), "b": jnp.ones((3, 5), jnp.bfloat16)}
    same = jax.tree.map(jnp.copy, tree)
    assert elastic_lib.digest(tree) == elastic_lib.digest(same)
    for name in tree:
        other = tree | {name: tree[name].at[-1].multiply(1.01)}
        assert elastic_lib.digest(tree) != elastic_lib.digest(other)
