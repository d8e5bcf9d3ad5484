"""The benchmark of accelerators: complete on a CPU with tiny sizes, whatever fails in between."""

import os
import subprocess
import sys

import jax
import pytest
from absl import flags

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
    "beside": [
        "the CPU as one more worker: a round of the devices alone over one of both, adaptive"
    ],
}
NOT_ON_CPU = ("the device tells no peak", "JAX has no other device than the CPU here")


def measured(*arguments):
    """(lines before the table, rows) of the program."""
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.accelerator", *arguments],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # most seconds are compiling
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    about, _, table = ended.stdout.partition("\n\n| figure | target | reached |\n|---|---|---|\n")
    return about, [Row(*line.strip("| ").split(" | ")) for line in table.splitlines()]


@pytest.mark.slow
def test_the_table_of_a_cpu_is_complete():
    about, rows = measured("--tiny")
    assert "cores, cpu, Python" in about
    expected = [begin for name in accelerator.GROUPS for begin in ROWS[name]]
    assert [row.figure.startswith(begin) for row, begin in zip(rows, expected, strict=True)] == [
        True
    ] * len(expected)
    for row in rows:
        reason = row.reached.partition("not measured: ")[2]
        assert (reason == "" and any(map(str.isdigit, row.reached))) or (
            reason.startswith(NOT_ON_CPU)
        ), row
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


def test_groups_are_processes_that_end_with_their_time(tmp_path):
    flags.FLAGS.mark_as_parsed()
    assert list(accelerator.in_process("beside", 120, str(tmp_path))) == [
        Row(ROWS["beside"][0], "> 1", f"not measured: {NOT_ON_CPU[1]}")
    ]
    assert list(accelerator.in_process("forms", 3, str(tmp_path))) == [
        Row("local forms", "none", "not measured: it took more than its 3 s")
    ]
    assert list(accelerator.in_process("forms", 2, str(tmp_path))) == [
        Row("local forms", "none", "not measured: the minutes were over")
    ]


def test_the_transformer_has_25_million_parameters():
    for name, count in (("lenet", 62_006), ("resnet18", 11_173_962), ("transformer", 25_000_000)):
        _, params, data = accelerator_models.problem(accelerator_models.MODELS[name])
        assert sum(x.size for x in jax.tree.leaves(params)) == pytest.approx(count, rel=0.01)
        model = accelerator_models.MODELS[name]
        examples = 5 * model.microbatch_size * model.budget
        assert {len(x) for x in jax.tree.leaves(data)} == {examples}


def test_operations_of_the_loss_and_its_gradient_are_those_of_products():
    model = accelerator_models.Model("mlp", {"hidden": (32,)}, (8, 8, 3), microbatch_size=4)
    loss_fn, params, data = accelerator_models.problem(model)
    batch = jax.device_put({name: x[:4] for name, x in data.items()})
    inputs, hidden, classes = 8 * 8 * 3, 32, 10
    products = 4 * 2 * (2 * inputs * hidden + 3 * hidden * classes)  # inputs have no gradient
    found = accelerator_models.Plain(loss_fn, params, batch, 1).operations()
    assert found == pytest.approx(products, rel=0.1)


def test_a_device_has_the_peak_of_its_longest_name(monkeypatch):
    class Device:
        device_kind = "NVIDIA H100 PCIe"

    sizes = accelerator_models.Sizes(True, 0.4)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(accelerator_models, "product_tflops", lambda dtype, sizes: (256, 200.0))
    assert accelerator_models.share_of_peak(75.6, "bfloat16", sizes) == (
        "10.0% of the device's 756; 37.8% of the 200 of a product of 256 x 256"
    )
    own = sizes._replace(peak_tflops=(1.0, 378.0))
    assert accelerator_models.share_of_peak(37.8, "float32", own).startswith("10.0% of the dev")
    Device.device_kind = "Tesla T4"
    assert accelerator_models.share_of_peak(1.0, "bfloat16", sizes).startswith(
        "no peak of 'Tesla T4' is known (--peak_tflops); "
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--peak_tflops=312", "--peak_tflops=312: must be two numbers above 0"),
        ("--peak_tflops=a,b", "--peak_tflops=a,b: must be two numbers above 0"),
        ("--only=gpu", "--only: there is no gpu; allowed are loop, forms"),
    ],
)
def test_wrong_flags_are_refused(flag, said):
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.accelerator", flag],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert said in ended.stderr
