"""Elastic runs over Ray, with all that a run can have: workers are killed, and nothing is lost."""

import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.launcher import launches
from tests.rounds import slice_problems

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # a node's processes
]
pytest.importorskip("ray", reason="Ray is missing: pip install 'hetjax[ray]'")
from tests.engines.test_ray import cluster  # noqa: E402, F401

SEATS, SIZE = 3, 240
SPEEDS = (0.01, 0.02, 0.04)  # seconds of a microbatch


def loss_fn(params, state, batch, rng, *, frozen, values):
    """Least squares of what is normed by running means."""
    running = 0.9 * state["mean"] + 0.1 * batch["x"].mean(axis=0)
    normed = batch["x"] - state["mean"][None]
    decay = values["decay"] * (params**2).sum()
    return (normed @ (params + frozen) - batch["y"]) ** 2 + decay, {"mean": running}


def examples():
    rng = np.random.default_rng(0)
    x = 1.0 + rng.normal(size=(SIZE, 6))
    return {"x": x, "y": x @ np.arange(6.0) + 0.1 * rng.normal(size=SIZE)}


def fit(**fields):
    given = {"epochs": 6, "microbatch_size": 4, "budget": 12, "seed": 3, "ema": 0.9}
    given |= {"progress": False, "loss_over": "microbatch", "eval_source": examples()}
    given |= {"values": lambda progress: {"decay": 1e-3 / (1.0 + progress)}}
    given |= {"metrics_fn": lambda params, state, batch: {"error": batch["x"] @ params}}
    optimizer, state = optax.sgd(0.02, momentum=0.5), {"mean": jnp.zeros(6)}
    frozen = {"frozen": jnp.ones(6), "model_state": state}
    return hetjax.fit(loss_fn, jnp.zeros(6), optimizer, examples(), **frozen, **given | fields)


def train(directory, seats, kills=(), **fields):
    """What each actor does. The leader kills: at a round a rank, once; then rounds are slow until
    its next start has joined."""
    jax.config.update("jax_enable_x64", True)
    hetjax.use_cpu_workers(1)
    rank = hetjax.join_processes().process_id
    (directory / f"pid-{rank}").write_text(str(os.getpid()))

    def on_round(report):
        with (directory / "rounds").open("a") as file:
            print(report.round, os.getpid(), file=file)
        for at, whom in kills:
            mark = directory / f"killed-{at}"
            if report.round >= at and not mark.exists():
                mark.touch()
                os.kill(int((directory / f"pid-{whom}").read_text()), signal.SIGKILL)
        if (directory / "run/metrics.jsonl").read_text().count('"joined"') < len(kills):
            time.sleep(0.3)  # so that they join before the end

    fields |= {"cluster": {"secs_per_microbatch": SPEEDS[:seats]}}
    writers = [hetjax.writers.csv()]
    found = fit(workdir=directory / "run", callbacks=[on_round], writers=writers, **fields)
    arrays = [each.addressable_data(0) for each in jax.tree.leaves(found.state)]
    content = b"".join(np.asarray(array).tobytes() for array in arrays)
    (directory / f"state-{os.getpid()}").write_bytes(content)
    return found


def launched(directory, *, seats=SEATS, max_failures=3, **fields):
    directory.mkdir(exist_ok=True)
    function = functools.partial(train, directory, seats, **fields)
    resources = [{"CPU": 1}] * seats
    return hetjax.ray.launch(function, resources, elastic=True, max_failures=max_failures)


def lines(directory):
    text = (directory / "run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def changes(directory):
    return [tuple(each) for line in lines(directory) for each in line.get("changes", ())]


def check_whole(directory, result):
    """Each example is done once an epoch, rounds have a line each, all ended in one state."""
    told = [result.summary[f"examples_{what}"] for what in ("missing", "duplicated")]
    assert told == [0, 0]
    assert [line["round"] for line in lines(directory)] == list(range(result.summary["rounds"]))
    states = [path.read_bytes() for path in directory.glob("state-*")]
    assert len(states) >= 2
    assert len(set(states)) == 1


def check_replayed(directory, result, **fields):
    """As one process computes the same quotas, in float64, and in the same form: `values` take
    float32, which another form rounds in another way."""
    fields |= {"cluster": {"num_workers": SEATS}, "replay": str(directory / "run/metrics.jsonl")}
    jax.config.update("jax_enable_x64", True)
    try:
        again = fit(local="stepped", **fields)
    finally:
        jax.config.update("jax_enable_x64", False)
    for name in ("params", "model_state", "ema_params"):
        for found, expected in zip(
            jax.tree.leaves(getattr(result, name)),
            jax.tree.leaves(getattr(again, name)),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=name)


def test_a_run_with_everything_loses_nothing_where_workers_are_killed(tmp_path):
    """A policy, a model's state, EMA, frozen parameters, values, evaluation, writers; also the
    leader is killed. Then the same call goes on with fewer seats."""
    fields = {"quota": "adaptive", "checkpoint": {"every_rounds": 5}, "epochs": 14}
    result = launched(tmp_path, kills=[(3, 1), (20, 0)], **fields)
    check_whole(tmp_path, result)
    assert {(1, "was killed"), (0, "was killed"), (1, "joined")} <= {*changes(tmp_path)}
    check_replayed(tmp_path, result, **fields)
    assert {"test_error", "test_ema_error"} <= result.summary.keys()
    with (tmp_path / "run/scalars.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == list(range(result.summary["rounds"]))
    assert "was killed" in (tmp_path / "run/report.html").read_text()
    for path in tmp_path.glob("state-*"):
        path.unlink()
    more = launched(tmp_path, seats=2, **fields | {"epochs": 16})
    assert more.summary["resumed"]
    assert more.summary["num_workers"] == 2
    check_whole(tmp_path, more)


def test_local_steps_of_killed_workers_are_taken_by_the_others(tmp_path):
    inner = {"name": "sgd", "learning_rate": 0.02, "momentum": 0.5}
    rule = hetjax.local_steps(inner, weights="fednova", keep=False)
    fields = {"rule": rule, "quota": "adaptive", "epochs": 14}
    result = launched(tmp_path, kills=[(3, 1), (20, 0)], **fields)
    check_whole(tmp_path, result)
    assert {(1, "was killed"), (0, "was killed"), (1, "joined")} <= {*changes(tmp_path)}
    check_replayed(tmp_path, result, **fields)


def test_a_gate_closes_rounds_also_when_a_worker_has_come_back(tmp_path):
    fields = {"gate": {"trigger": "quorum", "quorum": 2}, "quota": "equal", "epochs": 14}
    result = launched(tmp_path, kills=[(3, 1)], **fields)
    check_whole(tmp_path, result)
    assert changes(tmp_path) == [(1, "was killed"), (1, "joined")]
    joined = [line["round"] for line in lines(tmp_path) if "joined" in str(line.get("changes"))]
    after = [line for line in lines(tmp_path) if line["round"] > joined[0] and line["full"]]
    assert any(sum(line["microbatches_done"]) < sum(line["quotas"]) for line in after), after
    check_replayed(tmp_path, result, **fields)


JOINED = """
import json, pathlib, sys
from tests.engines import test_ray_elastic
test_ray_elastic.train(pathlib.Path(sys.argv[1]), 3, **json.loads(sys.argv[2]))
"""


def test_50_rounds_are_as_those_of_joined_processes_with_the_same_quotas(tmp_path):
    fields = {"quota": {"policy": "static", "proportions": [3.0, 2.0, 1.0]}}
    fields |= {"max_rounds": 50, "epochs": 50}
    result = launched(tmp_path / "ray", **fields)
    (tmp_path / "joined").mkdir()
    fields |= {"replay": str(tmp_path / "ray/run/metrics.jsonl")}
    command = [sys.executable, "-m", "hetjax.launch", f"--workers={SEATS}", "--", sys.executable]
    command += ["-c", JOINED, str(tmp_path / "joined"), json.dumps(fields)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, cwd=launches.ROOT, env=environment, timeout=240)
    joined = hetjax.load(tmp_path / "joined/run")
    assert [line["quotas"] for line in lines(tmp_path / "joined")] == [[6, 4, 2]] * 50
    differences = np.abs(np.asarray(joined.params) - result.params) / np.abs(result.params)
    print(f"the largest relative difference is {differences.max():.1e}")
    assert differences.max() <= 1e-12


REFUSED = [
    {"reducer": "d_psgd"},
    {"ordering": "pair_balance"},
    {"data": {"sharing": "process_local"}},
    {"data": {"sharing": "private"}},
    {"local": "virtual"},
]


def train_slices(directory):
    """The first has one device, the others two and four; who comes again has four."""
    jax.config.update("jax_enable_x64", True)
    rank = hetjax.join_processes().process_id
    started = directory / f"pid-{rank}"
    hetjax.use_cpu_workers(4 if started.exists() else 2**rank)
    started.write_text(str(os.getpid()))

    def on_round(report):
        mark = directory / "killed"
        if report.round >= 5 and not mark.exists():
            mark.touch()
            os.kill(int((directory / "pid-1").read_text()), signal.SIGKILL)
        if '"joined"' not in (directory / "run/metrics.jsonl").read_text():
            time.sleep(0.3)  # so that it joins before the end

    more = {"shape": "what is left", "proportions": (5, 1, 3), "callbacks": [on_round]}
    found = slice_problems.fit(workdir=directory / "run", **more)
    (directory / f"shape-{rank}").write_text(
        json.dumps(found.state.params["out"].sharding.mesh.size)
    )
    return found


def test_slices_of_unlike_shapes_lose_nothing_where_one_is_killed(tmp_path, float64):
    result = hetjax.ray.launch(
        functools.partial(train_slices, tmp_path), [{"CPU": 1}] * 3, elastic=True, max_failures=3
    )
    assert [(tmp_path / f"shape-{rank}").read_text() for rank in range(3)] == ["1", "4", "4"]
    assert {rank for rank, _ in changes(tmp_path)} == {1}
    told = [result.summary[f"examples_{what}"] for what in ("missing", "duplicated")]
    assert told == [0, 0]
    trace = {"local": "virtual", "replay": str(tmp_path / "run/metrics.jsonl"), "workers": 3}
    with jax.numpy_dtype_promotion("standard"):  # as adamw needs
        expected = slice_problems.fit(proportions=(5, 1, 3), **trace)
    for a, b in zip(*map(jax.tree.leaves, (result.params, expected.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def refusals():
    hetjax.use_cpu_workers(1)
    said = []
    for fields in REFUSED:
        try:
            fit(**fields)
        except ValueError as error:
            said.append(str(error))
    fit(epochs=1)
    return said


def test_what_needs_more_is_refused_by_a_sentence():
    result = hetjax.ray.launch(refusals, [{"CPU": 1}], elastic=True)
    names = ["reducer.name", "ordering.method", "data.sharing", "data.sharing", "local"]
    assert [text.partition(":")[0] for text in result] == names
    assert all("over Ray without elastic=True" in text for text in result)
