"""The benchmark of accelerators: complete on a CPU with tiny sizes, whatever fails in between."""

import os
import subprocess
import sys

import pytest

from experiments.benchmarks import accelerator, accelerator_models
from experiments.benchmarks.rows import Row, read

MODEL = ["images a second", "plain JAX", "peak", "product"]
MODEL += ["first round", "compiling", "first steps", "compiling", "memory"]
ROWS = {  # of each group, what the names have
    "loop": ["mlp: bare loop", "mlp: hetjax over bare loop"],
    "forms": ["mlp: stepped", "mlp: fused over stepped", "mlp: virtual over stepped"],
    "depth": ["mlp: depth 1", "mlp: depth 2 over depth 1", "mlp: depth 4 over depth 1"],
    "host": [f"{policy}: " for policy in ("equal", "adaptive") for _ in range(3)],
    "orders": ["mlp: random order", "mlp: d_grab over random order"],
    "kernels": ["kernel over a copy in place", "kernel over a copy to new memory", "kernel"],
    **{
        f"{name}_{dtype}": [MODEL[0].replace("images", model.unit), *MODEL[1:]]
        for name, model in accelerator_models.TINY_MODELS.items()
        for dtype in accelerator_models.DTYPES
    },
    "processes": ["equal quotas over adaptive", "equal: a round", "adaptive: a round"],
    "beside": ["devices alone over both"],
}
# The models' shares of a peak and memory, and a CPU beside.
NOT_ON_CPU = ("no peak of", "the device tells no peak", "JAX has no other device than the CPU here")


@pytest.mark.slow
def test_the_table_of_a_cpu_is_complete():
    command = [sys.executable, "-m", "experiments.benchmarks.accelerator", "--tiny"]
    environ = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most seconds are compiling
    said = subprocess.check_output(command, env=environ, text=True)
    rows = [row for row in read(said) if isinstance(row, Row)]
    assert "cores, cpu, Python" in said.splitlines()[0]
    expected = [part for name in accelerator.GROUPS for part in ROWS[name]]
    assert all(part in row.name for row, part in zip(rows, expected, strict=True))
    for row in rows:
        reason = row.figure.partition("not measured: ")[2]
        assert (reason == "" and any(map(str.isdigit, row.figure))) or (
            reason.startswith(NOT_ON_CPU)
        ), row
    assert sum("not measured" in row.figure for row in rows) == 13


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
