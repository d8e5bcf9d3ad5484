"""What a member of a run starts, a reader of data or a pool, is no member."""

import os
import subprocess
import sys

import pytest

from hetjax.comm import join
from tests.launcher import launches

SCRIPT = """
import concurrent.futures, multiprocessing, os, sys
import hetjax
hetjax.join_processes(*map(int, sys.argv[1:3]), *sys.argv[3:])
import jax, numpy as np, optax
from hetjax.comm import join
from hetjax.liveness import heartbeats
class Source:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"x": np.float32(i % 3)}
def loss(p, b, rng):
    return (b["x"] - p) ** 2
def told():
    join.check_joined()
    hetjax.use_cpu_workers(2)
    is_silent = type(heartbeats.start()) is heartbeats.Heartbeats
    return hetjax.join_processes(), hetjax.leads(), is_silent, jax.process_count()
if __name__ == "__main__":
    how = {"feed": "streamed", "readers": "processes:1"}
    found = hetjax.fit(loss, np.float32(0), optax.sgd(.01), Source(), microbatch_size=8, budget=4,
                       epochs=1, progress=False, data=how)
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            assert pool.submit(told).result() == (None, False, True, 1)
    is_marked = os.environ["HETJAX_JOINED"] == str(os.getpid())
    print("DONE", found.summary["examples_missing"], is_marked)
elif hetjax.leads():
    raise RuntimeError("a child leads")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("way", ["joined", "apart", "arguments"])
def test_children_of_members_do_not_join(way, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "hetjax.launch", "--workers=2", "--max_restarts=0"]
    commands = [[*launch, f"--runtime={way}", "--", sys.executable, str(script)]]
    environment = {**os.environ, "HETJAX_JOINED": "1", "PYTHONPATH": str(launches.ROOT)}
    if way == "arguments":
        address = f"127.0.0.1:{join.find_port('127.0.0.1')}"
        commands = [[sys.executable, str(script), own, "2", address] for own in "01"]
        del environment["HETJAX_JOINED"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen(each, env=environment, **pipes) for each in commands]
    try:
        said = "".join(run.communicate(timeout=launches.PATIENCE_SECS)[0] for run in runs)
    finally:
        for run in runs:
            run.kill()
    assert said.count("DONE 0 True") == 2, said
    assert [run.returncode for run in runs] == [0] * len(runs), said


def test_what_trains_needs_a_guard_in_a_child(monkeypatch):
    monkeypatch.setattr("multiprocessing.process._current_process._inheriting", True, raising=False)
    with pytest.raises(ValueError, match="under `if __name__ == '__main__':`"):
        join.check_joined()
