"""What `launch` returns of an elastic run over Ray, where functions return, fail or are killed."""

import functools
import os
import pathlib
import re
import signal
import time

import numpy as np
import optax
import pytest

import hetjax
from experiments.drills import ray_ends, ray_nodes
from hetjax.records import workdir as workdir_lib

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # a node's processes
]
ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'hetjax[ray]'")


GOES = ("fails", "unseen by a newcomer")  # until there is a file


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **ray_nodes.VARIABLES}.items():
            patch.setenv(name, value)
        found = ray_nodes.Nodes(2, connects=False)
        yield found
        found.close()


def train(case, directory):
    """What a worker does in a case, and what the rank returns."""
    rank, first = hetjax.join_processes().process_id, directory / "first"
    is_newcomer = (directory / "begun").exists()
    if (case, rank) in (("returns 0", 0), ("returns 1", 1)) or case == "returns all":
        return f"{rank} without a fit"
    if is_newcomer and case == "fails":
        raise TypeError(f"worker {rank} cannot begin")
    workdir = directory / "run"
    if case.startswith("unseen"):  # one path, two directories
        workdir_lib.PATIENCE_SECS = 0.5
        workdir = pathlib.Path("run")
        (own := directory / f"node{rank * (case == 'unseen' or is_newcomer)}").mkdir(exist_ok=True)
        os.chdir(own)

    def on_round(report):
        (directory / "begun").touch()
        if case in GOES and not first.exists() and report.round >= 5:
            first.touch()
            os.kill(int((directory / "pid-1").read_text()), signal.SIGKILL)
        time.sleep(0.02)
        return (directory / "over").exists() or (case not in GOES and report.round >= 20)

    hetjax.use_cpu_workers(1)
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    x = np.ones((64, 4), np.float32)
    result = hetjax.fit(
        lambda w, batch, rng: (batch["x"] @ w - 1) ** 2,
        np.zeros(4, np.float32),
        optax.sgd(0.1),
        {"x": x},
        eval_source={"x": x},
        epochs=1_000,
        microbatch_size=4,
        budget=4,
        callbacks=[on_round],
        progress=False,
        workdir=workdir,
    )
    if case.startswith("is lost"):
        mark = directory / f"lost-{rank}"
        if (case == "is lost, 0" and rank == 0) or (case == "is lost, all" and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return rank, result


def launched(case, directory, max_failures):
    directory = pathlib.Path(directory)
    value = hetjax.ray.launch(
        functools.partial(train, case, directory),
        [{"CPU": 1, f"node{k}": 1} for k in range(2)],
        elastic=True,
        max_failures=max_failures,
    )
    print("returned", value[0] if isinstance(value, tuple) else value)
    if isinstance(value, tuple):
        directory = directory / "node0" if case in GOES[1:] else directory
        assert value[1].workdir == directory / "run"
        assert value[1].summary["examples_missing"] == value[1].summary["examples_duplicated"] == 0
        np.testing.assert_array_equal(value[1].params, hetjax.load(directory / "run").params)


CODE = (
    "import sys; from tests.engines import test_ray_returns as here;"
    "here.launched({}, sys.argv[1], {})"
)


@pytest.fixture
def run(nodes, tmp_path):
    """Begins a run of a case."""
    begun = []

    def begin(case, max_failures=0):
        begun.append(
            ray_ends.Program(CODE.format(repr(case), max_failures), tmp_path, nodes.address)
        )
        return begun[-1]

    yield begin
    for program in begun:
        program.process.kill()
        program.process.wait()


def said(program):
    ray_ends.wait(lambda: program.process.poll() is not None, "the end of the driver")
    return program.said()


UNSEEN = ".*/node1/run'. does not see the workdir of process 0 .*/node0/run'.; give one on"


@pytest.mark.parametrize(
    ("case", "max_failures", "words"),
    [
        ("ends", 0, "returned 0$"),
        ("returns all", 0, "returned 0 without a fit$"),
        ("returns 1", 0, r"run begins without worker 1: it has ended before[^$]*returned 0$"),
        ("returns 0", 0, "RuntimeError: launch: worker 0 has returned without a fit, and worker 1"),
        ("unseen", 0, f"ValueError: process 1 .{UNSEEN}"),
        ("is lost, 0", 1, "worker 0 was killed: .*; the run was over[^$]*returned 1$"),
        ("is lost, all", 2, "no worker is left to return its result; all start[^$]*returned 0$"),
    ],
)
def test_launch_returns(case, max_failures, words, run):
    program = run(case, max_failures)
    text = said(program)
    assert re.search(words, text, re.MULTILINE), text
    assert program.process.returncode == ("Error: " in words), text
    assert "has lost the referee" not in text


@pytest.mark.parametrize(
    ("case", "max_failures", "words"),
    [
        ("fails", 0, ""),
        ("fails", 2, "TypeError: worker 1 cannot begin; "),
        ("unseen by a newcomer", 1, f"ValueError: process 1 .{UNSEEN}"),
    ],
)
def test_the_others_go_on_where_newcomers_fail(case, max_failures, words, run, tmp_path):
    program = run(case, max_failures)
    spent = r"worker 1 (was killed|failed): .*; its seat stays empty: max_failures are spent"
    ray_ends.wait(lambda: re.search(spent, program.said()), "the end of all failures")
    (tmp_path / "over").touch()
    text = said(program)
    assert len(re.findall(f"worker 1 failed: {words}", text)) == max_failures
    assert "returned 0" in text
    assert program.process.returncode == 0, text
