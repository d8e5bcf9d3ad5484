"""Who leads a run apart is killed, or interrupted with those who come: what stays of it?"""

import concurrent.futures
import csv
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax import types
from hetjax.processes import place, shared_sums
from tests.launcher import launches
from tests.launcher.conftest import launch  # noqa: F401
from tests.processes import apart_program, test_apart
from tests.processes.test_apart import apart, places  # noqa: F401


@pytest.mark.slow
def test_a_new_leader_knows_what_was_judged_and_written(apart):  # noqa: F811
    """Worker 0 is killed, and may come back in time; worker 1, which leads then, is asked to go."""
    fields = {"epochs": 40, "evaluates": True}
    launched, workdir = apart(writes=True, **fields)
    (match,), _ = launched.wait_for(r"--add=(\S+)")
    launches.eventually(lambda: sum("eval" in line for line in test_apart.lines(workdir)) > 1)
    os.kill(test_apart.pid_of(launched, 0), signal.SIGKILL)
    launched.wait_for("worker 1 leads from round")
    command = [sys.executable, "-m", "hetjax.launch", f"--remove={match[1]}:1"]
    subprocess.run(command, check=True, cwd=launches.ROOT)
    launched.wait_for("worker 2 leads from round")
    told = test_apart.results(launched)
    assert told.keys() - {0} == {2}
    lines = test_apart.lines(workdir)
    evals = {line["round"]: line["eval"] for line in lines if line.get("eval")}
    assert len(evals) == fields["epochs"]
    first = min(evals)
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["best_test_loss"] == max(each["test_loss"] for each in evals.values())
    assert summary["test_loss"] == evals[len(lines) - 1]["test_loss"]
    assert "resumed" not in summary
    with (workdir / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(lines)))
    again = {"cluster": {"num_workers": 3}, "replay": str(workdir / "metrics.jsonl")}
    with jax.enable_x64(True):
        best = apart_program.fit(local="virtual", max_rounds=first + 1, **fields, **again).params
    for each in told.values():
        assert each["judged"] == {k: v for k, v in each["judged"].items() if k in summary}
        assert each["judged"]["best_test_loss"] == pytest.approx(summary["best_test_loss"])
        found = [float.fromhex(x) for x in each["best"]]
        np.testing.assert_allclose(found, best, rtol=1e-12)
        assert each["resumed"] is None
    test_apart.check_exact(workdir, told, **fields)


@pytest.mark.slow
def test_an_interrupt_saves_the_run_while_another_worker_starts(apart):  # noqa: F811
    launched, workdir = apart(f"--max_workers={test_apart.WORKERS + 1}", epochs=1000)
    (match,), _ = launched.wait_for(r"--add=(\S+)")
    test_apart.after(5, workdir)
    command = [sys.executable, "-m", "hetjax.launch", f"--add={match[1]}"]
    subprocess.run(command, check=True, cwd=launches.ROOT)
    launches.eventually((launched.beacons / f"process-{test_apart.WORKERS}.beacon").exists)
    launched.send(signal.SIGINT)
    assert launched.end() == 130
    assert "the same call goes on from there" in launched.text()
    assert any((workdir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("seat", "start", "leads"), [("0", "0", True), ("1", "1", False), ("0", "3", False)]
)
def test_who_leads_is_known_before_it_has_joined(seat, start, leads, monkeypatch):
    monkeypatch.setenv("HETJAX_PROCESS_ID", seat)
    monkeypatch.setenv("HETJAX_START", start)
    assert hetjax.leads() == leads


def test_a_runtime_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("HETJAX_RUNTIME", "together")
    with pytest.raises(ValueError, match="HETJAX_RUNTIME=together: must be joined or apart"):
        place.of_environment()


@test_apart.of_places
def test_who_waits_for_a_sleeping_adder_knows_it(tmp_path, monkeypatch):
    """In the first of two rounds it sleeps before it adds."""
    _, members = test_apart.two_of(tmp_path)
    sums = [member.sums(jnp.zeros(2)) for member in members]
    add_up, secs = shared_sums.add_up, [1.0, 0.0]
    monkeypatch.setattr(
        shared_sums, "add_up", lambda *given: (time.sleep(secs.pop(0)), add_up(*given))
    )
    contributed = types.Contribution(jnp.ones((1, 2)), *[()] * 5)

    def a_round(index):
        members[index].begins(members[index].turn.number, jnp.zeros(1))
        sums[index].post(contributed)
        test_apart.tell(members[index], members[index].turn.number, 1.0)
        total = sums[index].total(contributed, np.array([1.0, 2.0])).sums
        return total.tolist(), sums[index].has_waited

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: member.meets(), members))
        for has_waited in (True, False):
            found = list(threads.map(a_round, range(2)))
            assert found == [([[2.0, 2.0]], False), ([[2.0, 2.0]], has_waited)]
