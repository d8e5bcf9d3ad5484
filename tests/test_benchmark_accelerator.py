"""The benchmark of accelerators: complete on a CPU with tiny sizes, whatever fails in between."""

import os
import re
import subprocess
import sys

import pytest

from experiments.benchmarks import accelerator, accelerator_models
from experiments.benchmarks.rows import Row

ROWS = {  # of each group, how the figures begin
    "loop": ["a round over the bare loop of the same calls, mlp"],
    "forms": ["local forms, a round, mlp"],
    "depth": ["microbatches in flight (dispatch_depth), a round, mlp"],
    "host": ["host cost of a round with a model of negligible compute, 1 worker"],
    "orders": ["a step with d_grab over one without, mlp"],
    "kernels": ["cpu: bytes of differences"],
    **{
        f"{name}_{dtype}": [f"{model.name} of "] * 3
        for name, model in accelerator_models.TINY_MODELS.items()
        for dtype in accelerator_models.DTYPES
    },
    "processes": ["2 processes on one cpu, each with 0.45 of its memory"],
    "beside": ["the CPU as one more worker: a round of the devices alone over one of both, adapt"],
}
NOT_ON_CPU = ("the device tells no peak", "JAX has no other device than the CPU here")


@pytest.mark.slow
def test_the_table_of_a_cpu_is_complete():
    command = [sys.executable, "-m", "experiments.benchmarks.accelerator", "--tiny"]
    environ = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most seconds are compiling
    said = subprocess.check_output(command, env=environ, text=True)
    about, _, table = said.partition("\n\n| figure | target | reached |\n|---|---|---|\n")
    rows = [Row(*line.strip("| ").split(" | ")) for line in table.splitlines()]
    assert "cores, cpu, Python" in about
    expected = [begin for name in accelerator.GROUPS for begin in ROWS[name]]
    for row, begin in zip(rows, expected, strict=True):
        assert row.figure.startswith(begin)
        reason = row.reached.partition("not measured: ")[2]
        assert reason.startswith(NOT_ON_CPU) if reason else re.search(r"\d", row.reached), row
    assert sum("not measured" in row.reached for row in rows) == 7


def test_a_group_that_fails_leaves_its_rows_and_says_why():
    def rows(sizes):
        yield Row("first", "none", str(sizes.secs))
        raise OSError("no | memory\nleft")

    group = accelerator.Group("all of it", 1, rows)
    found = list(accelerator.guarded(group, accelerator_models.Sizes(True, 1.5)))
    assert found == [
        Row("first", "none", "1.5"),
        Row("all of it", "none", "not measured: OSError: no / memory left"),
    ]
