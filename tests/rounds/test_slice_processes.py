"""Slices in real processes: joined, and apart of unlike shapes; what their programs do."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.launcher import launches
from tests.launcher.conftest import launch  # noqa: F401
from tests.rounds import slice_problems

PROGRAM = """
import runpy, sys
sys.argv = ["slice_problems", os.environ["SLICES"]]
runpy.run_module("tests.rounds.slice_problems", run_name="__main__")
"""
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


@pytest.fixture
def directory(tmp_path_factory):
    """In which processes leave what they found; the launcher's own has to be empty at its end."""
    return tmp_path_factory.mktemp("found")


@pytest.fixture
def started(launch, monkeypatch, directory):  # noqa: F811
    """Starts processes; returns the launcher."""

    def start(*flags, **given):
        given = {"directory": str(directory), "proportions": (5, 1, 3)} | given
        monkeypatch.setenv("SLICES", json.dumps(given))
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        return launch(PROGRAM, *flags)

    return start


def results(launched, directory):
    """What each process told, and its parameters."""
    assert launched.end() == 0, launched.text()
    found = [re.search(r"\[(\d+)\] result (.*)", line) for line in launched.out()]
    told = {int(match[1]): json.loads(match[2]) for match in found if match}
    for process, of_process in told.items():
        assert (of_process["missing"], of_process["duplicated"]) == (0, 0)
        with np.load(directory / f"{process}.npz") as arrays:
            of_process["params"] = [arrays[str(n)] for n in range(len(arrays))]
    return told


def check_equal(told, **fields):
    expected = jax.tree.leaves(slice_problems.fit(**fields).params)
    for of_process in told.values():
        for found, leaf in zip(of_process["params"], expected, strict=True):
            np.testing.assert_allclose(found, leaf, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["fsdp", "tensor parallel"])
def test_two_joined_processes_train_as_one_device_does(shape, started, directory, float64):
    launched = started("--workers=2", shape=shape, devices=[4], proportions=(5, 1, 3, 0))
    told = results(launched, directory)
    assert [told[k]["mesh"]["worker"] for k in (0, 1)] == [4, 4]
    assert told[0]["quotas"] == [5, 1, 3, 0]
    check_equal(told, workers=1)


@pytest.mark.slow
def test_slices_of_1_2_and_4_devices_train_in_one_run(started, directory, float64):
    launched = started("--workers=3", "--runtime=apart", shape="what is left", devices=[1, 2, 4])
    told = results(launched, directory)
    assert [told[k]["mesh"]["data"] for k in range(3)] == [1, 2, 4]
    check_equal(told, workers=1)
    sent, _ = told[0]["bytes"]
    of_params = sum(leaf.nbytes for leaf in jax.tree.leaves(slice_problems.params()))
    assert sent / 3 <= 2 * of_params  # of each: to both others, what it contributes


def killed_after(launched, workdir, *, rounds, process):
    """Kills a process once so many rounds are done."""

    def count():
        path = workdir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    launches.eventually(lambda: count() >= rounds)
    os.kill(launched.pids(2)[process], signal.SIGKILL)


@pytest.mark.slow
def test_joined_slices_go_on_from_a_checkpoint_to_the_bit(started, directory, float64):
    fields = {"shape": "both", "devices": [4], "proportions": (5, 3)}
    cluster = {"num_workers": 2, "secs_per_microbatch": (0.02,) * 2}
    fields |= {"cluster": cluster, "checkpoint": {"every_rounds": 4}, "max_rounds": 14}
    whole = results(started("--workers=2", **fields, workdir=str(directory / "whole")), directory)
    launched = started("--workers=2", **fields, workdir=str(directory / "run"))
    killed_after(launched, directory / "run", rounds=6, process=1)
    launched.wait_for(r"going on with the run in .* from round \d+")
    told = results(launched, directory)
    for process in (0, 1):
        for a, b in zip(told[process]["params"], whole[process]["params"], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_slice_that_is_killed_is_replaced_by_one_of_another_shape(started, directory, float64):
    workdir = directory / "run"
    cluster = {"num_workers": 3, "secs_per_microbatch": (0.05,) * 3}
    fields = {"workdir": str(workdir), "cluster": cluster, "max_rounds": 60}
    more = {"shape": "what is left", "devices": [1, 2, 4, 4]}
    launched = started("--workers=3", "--runtime=apart", **more, **fields)
    killed_after(launched, workdir, rounds=5, process=0)
    launched.wait_for(r"round \d+: worker 0 joins")
    told = results(launched, directory)
    assert [told[k]["mesh"]["data"] for k in range(3)] == [4, 2, 4]
    replayed = {"local": "virtual", "replay": str(workdir / "metrics.jsonl"), "workers": 3}
    check_equal(told, max_rounds=60, proportions=(5, 1, 3), **replayed)


@pytest.mark.slow
def test_no_collective_of_the_local_phase_crosses_workers(tmp_path):
    """Programs of one worker's devices alone have any, but for the sums of the synchronisation,
    which gathers nothing."""
    program = """
import jax
from tests.rounds import slice_problems
jax.config.update("jax_num_cpu_devices", 8)
slice_problems.fit(shape="both", workers=2, max_rounds=2)
"""
    dumped = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    variables = os.environ | {"XLA_FLAGS": dumped, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, env=variables, cwd=launches.ROOT)
    found = {}
    for path in sorted(tmp_path.glob("*after_optimizations.txt")):
        name = re.search(r"jit_(\w+)\.", path.name)[1]
        text = path.read_text()
        is_wide = "num_partitions=8" in text
        assert is_wide or "num_partitions=4" in text or "num_partitions" not in text, name
        found.setdefault((name, is_wide), set()).update(COLLECTIVE.findall(text))
    assert found["add", False] >= {"all-gather", "all-reduce"}
    assert found["finish", False] == set()
    assert {name: kinds for (name, is_wide), kinds in found.items() if is_wide and kinds} == {
        "synchronise": {"all-reduce"}
    }
