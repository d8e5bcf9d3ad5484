"""A signal ends a run of several processes saved, to whomever it is sent, however long it saves."""

import json
import os
import signal
import subprocess
import sys

import pytest

from hetjax.comm import join
from tests.launcher import launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
PROGRAM = """
import os, time
import hetjax
hetjax.join_processes(*{arguments})
import numpy as np, optax
from hetjax.checkpoints import files
seal = files.seal
def seals_slowly(*given):
    time.sleep({secs})
    seal(*given)
files.seal = seals_slowly
def loss(p, b, rng):
    return (b["x"] - p) ** 2
data = {{"x": np.ones(4096, np.float32)}}
print("pid", os.getpid())
hetjax.fit(loss, np.float32(0), optax.sgd(.01), data, microbatch_size=4, budget=8, epochs=10000,
           progress=False, workdir={workdir!r}, callbacks=[lambda report: time.sleep(.05)])
"""
EACH = [
    ("SIGINT", "launcher", "joined", 20),
    ("SIGINT", "worker", "apart", 3),
    ("SIGTERM", "worker", "joined", 3),
    ("SIGHUP", "group", "joined", 3),
    ("SIGUSR1", "launcher", "apart", 3),
    ("SIGUSR2", "worker", "joined", 3),
]
SLOW = [("SIGINT", "group", "joined", 20), ("SIGHUP", "launcher", "apart", 20)]


@pytest.mark.parametrize(
    ("name", "to", "runtime", "secs"),
    [*EACH, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_a_signal_ends_all_saved(name, to, runtime, secs, launch, tmp_path_factory):
    workdir, number = tmp_path_factory.mktemp("run"), signal.Signals[name]
    how = {"workdir": str(workdir), "secs": secs}

    def begun():
        path = workdir / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") > 3

    if to == "group":
        address = f"127.0.0.1:{join.find_port('127.0.0.1')}"
        runs = []
        for own in range(2):
            program = PROGRAM.format(arguments=(own, 2, address), **how)
            group = runs[0].pid if runs else 0
            runs.append(subprocess.Popen([sys.executable, "-c", program], process_group=group))
        try:
            launches.eventually(begun)
            os.killpg(runs[0].pid, number)
            codes = {run.wait(launches.PATIENCE_SECS) for run in runs}
        finally:
            for run in runs:
                run.kill()
        assert codes == {-number if number == signal.SIGINT else 128 + number}
    else:  # the limit of 15 s is moved while a process saves
        flags = ["--workers=2", f"--runtime={runtime}", "--grace_secs=5"]
        run = launch(PROGRAM.format(arguments=(), **how), *flags)
        pids = run.pids(4)  # the launcher's preamble prints them, too
        launches.eventually(begun)
        if to == "launcher":
            run.send(number)
        else:
            os.kill(pids[1], number)
        assert run.end() == 128 + number
        assert "restart" not in run.text()
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["stopped_by"] == name
    kept = {"checkpoints", "config.json", "generations", "metrics.jsonl"}
    kept |= {"report.html", "summary.json"}
    assert {path.name for path in workdir.iterdir()} == kept
    (saved,) = (workdir / "checkpoints").iterdir()
    assert saved.name == f"{summary['rounds']:08d}"
