"""One run at a time in a workdir."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from hetjax.records import lock
from tests.rounds import problems

HOLDER = """
import contextlib, pathlib, sys, time
from hetjax.records import lock
with contextlib.ExitStack() as stack:
    lock.Holder(stack, pathlib.Path(sys.argv[1])).hold()
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def held(workdir):
    with contextlib.ExitStack() as stack:
        lock.Holder(stack, workdir).hold()
        yield


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdout.close()
    process.kill()
    process.wait()


def test_a_workdir_of_another_process_is_refused_with_its_name(holder, tmp_path):
    message = rf"in use by process {holder.pid} on .+ since \d{{4}}-"
    with pytest.raises(ValueError, match=message), held(tmp_path):
        pass
    assert json.loads((tmp_path / "lock.json").read_text())["process"] == holder.pid


def test_a_lock_whose_process_was_killed_is_taken_over(holder, tmp_path, capsys):
    holder.kill()
    holder.wait()
    with held(tmp_path):
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()
    assert f"was held by process {holder.pid} on" in capsys.readouterr().err
    assert not (tmp_path / "lock.json").exists()


def test_two_runs_of_one_process_do_not_share_a_workdir(tmp_path):
    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)

    def again(line):
        problems.fit(data, weights, workdir=tmp_path, epochs=1)

    with pytest.raises(ValueError, match="in use by another run of this process"):
        problems.fit(data, weights, workdir=tmp_path, epochs=1, callbacks=[again])
    problems.fit(data, weights, workdir=tmp_path, epochs=1)  # the failed run has let go of it


def test_a_forked_child_does_not_hold_the_lock_on(tmp_path):
    """As the readers of a data loader do, which live on where a run is killed."""
    script = (
        "import contextlib, multiprocessing, os, pathlib, signal, sys, time\n"
        "from hetjax.records import lock\n"
        "with contextlib.ExitStack() as stack:\n"
        "    lock.Holder(stack, pathlib.Path(sys.argv[1])).hold()\n"
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "    child.start()\n"
        "    pathlib.Path(sys.argv[1], 'child').write_text(str(child.pid))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert "fork" in multiprocessing.get_all_start_methods()
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)  # it is there
        with held(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
