"""A wheel holds all that is needed: it trains outside a checkout, by scripts and by commands."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.pages.blocks import blocks

pytest.importorskip("setuptools", minversion="77")

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = """
import hetjax, optax
from flax import nnx
from hetjax.zoo import datasets, models

hetjax.use_cpu_workers(2)
digits = datasets.load("digits", "data")
shape, classes = digits.example_shape, digits.num_classes
model = models.make("logistic", shape, classes, rngs=nnx.Rngs(0), input_max=16.0)


def loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


loss_fn, params = hetjax.nnx_loss(model, loss)
result = hetjax.fit(
    loss_fn, params, optax.adam(1e-2), digits.train, microbatch_size=16, budget=4, epochs=2
)
assert result.summary["train_loss"] < 1.5, result
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory that holds what a wheel of this checkout installs, and nothing else."""
    built, unpacked = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("unpacked")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    source = tmp_path_factory.mktemp("source")  # setuptools writes beside what it reads
    for name in ("experiments", "hetjax", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", build, str(built)], cwd=source, check=True)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


@pytest.mark.slow
def test_a_wheel_trains_outside_a_checkout(installed, tmp_path):
    command = [
        sys.executable,
        "-c",
        f"{DIGITS}assert hetjax.__file__.startswith({str(installed)!r})",
    ]
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run(command, env=environ, check=True, cwd=tmp_path)


@pytest.mark.slow
def test_the_commands_of_a_wheel_train_compare_and_resume_what_is_ones_own(installed, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    texts = [text for _, text in blocks(ROOT / "docs" / "commands.md")]
    for name, text in zip(("mine.py", "my_config.py"), texts, strict=True):
        (tmp_path / name).write_text(text)

    def run(command, *arguments):
        words = [sys.executable, "-m", f"experiments.{command}", *arguments]
        found = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def lines_of(path):
        return [json.loads(line) for line in (tmp_path / path).read_text().splitlines()]

    more = ["--config.quota.policy=equal", "--workdir=run"]
    run("train", "--config=my_config.py", *more, "--config.epochs=2")
    first = lines_of("run/metrics.jsonl")
    run("train", "--config=run/config.json", "--workdir=run", "--config.epochs=4")
    run("train", "--config=my_config.py", *more, "--config.epochs=4", "--workdir=whole")
    went_on, whole = lines_of("run/metrics.jsonl"), lines_of("whole/metrics.jsonl")
    assert len(first) == 12
    assert went_on[:12] == first
    assert [line["loss"] for line in went_on] == [line["loss"] for line in whole]

    sweep = ["--configs=my_config.py", "--set=epochs=1", "--directory=sweep"]
    table = run("compare", *sweep, "--grid=model.arguments.width=4,8")
    assert "| model.arguments.width=8 |" in table
    assert len(lines_of("sweep/runs.jsonl")) == 2
    where = "import experiments; print(experiments.__file__)"
    said = subprocess.check_output([sys.executable, "-c", where], cwd=tmp_path, env=environ)
    assert str(installed) in said.decode()
