"""hetjax as actors of Ray and in Ray Train: on one machine, nodes of a Ray cluster as processes."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import hetjax
from experiments.drills import engines_ray
from tests.pages import test_ray_page

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # a node's processes
]
os.environ.update(engines_ray.TOKEN)  # Ray reads the mode when it is imported
ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'hetjax[ray]'")
PATIENCE_SECS = 240


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A head with a GPU in its books, and a node that a test may take away."""
    from ray import cluster_utils

    variables = {"JAX_PLATFORMS": "cpu"}
    variables["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # Ray takes a report as often
    kept = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False}
    found = cluster_utils.Cluster(initialize_head=True, connect=True, head_node_args=head)
    found.second = found.add_node(num_cpus=2)
    yield found
    ray.shutdown()
    found.shutdown()
    for name, value in kept.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same processes under hetjax's launcher."""
    return engines_ray.reference(tmp_path_factory.mktemp("launcher"))


AS_UNDISTURBED = {"whole": True, "bit_equal": True, "missing": 0, "doubled": 0}


def test_actors_with_unequal_resources_train_as_processes_of_the_launcher(tmp_path, undisturbed):
    result = engines_ray.launched(tmp_path, max_failures=0)
    assert type(result).__name__ == "SavedRun"
    assert result.params["w"].shape == (16,)
    assert result.summary["rounds"] == engines_ray.EPOCHS * engines_ray.ROUNDS_PER_EPOCH
    assert engines_ray.compared(tmp_path, undisturbed) == AS_UNDISTURBED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_started_anew_and_the_run_goes_on(rank, tmp_path, undisturbed, capfd):
    told = engines_ray.repetition(7, tmp_path / "run", undisturbed, rank=rank)
    assert told == told | AS_UNDISTURBED | {"left_in_memory": 0}
    assert min(told["secs"].values()) >= 0
    assert sum(told["secs"].values()) == pytest.approx(told["secs_to_first_new_round"], abs=0.05)
    words = rf"hetjax: worker {rank} died: .*anew from the last checkpoint \(1 of 1\)"
    assert re.search(words, capfd.readouterr().err)


def test_sigterm_to_a_worker_saves_and_all_start_anew(tmp_path, undisturbed, capfd):
    def end():
        os.kill(int((tmp_path / "began-1").read_text()), signal.SIGTERM)

    with engines_ray.Disturbed(tmp_path, 25, end):
        engines_ray.launched(tmp_path)
    assert engines_ray.compared(tmp_path, undisturbed) == AS_UNDISTURBED
    assert "left by SystemExit(143); all start anew" in capfd.readouterr().err
    rounds = [line.split()[1] for line in (tmp_path / "rounds").read_text().splitlines()]
    assert len(rounds) == len(set(rounds))  # none was done again


def test_a_lost_node_is_left_and_the_run_goes_on(cluster, tmp_path, undisturbed):
    nodes = [cluster.second, cluster.add_node(num_cpus=2)]

    def lose():
        stat = pathlib.Path("/proc", (tmp_path / "began-1").read_text(), "stat").read_text()
        raylet = int(stat.rpartition(")")[2].split()[1])  # the parent of the node's workers
        (lost,) = (n for n in nodes if n.all_processes["raylet"][0].process.pid == raylet)
        cluster.remove_node(lost, allow_graceful=False)

    with engines_ray.Disturbed(tmp_path, 12, lose) as disturbed:
        engines_ray.launched(tmp_path)
    assert engines_ray.compared(tmp_path, undisturbed) == AS_UNDISTURBED
    assert disturbed.figures()["secs_to_first_new_round"] > 0


def _on_parts(directory, killed):
    own = jax.process_index()
    x = np.random.default_rng(own).normal(size=(50 + 33 * own, 4)).astype(np.float32)

    def on_round(report):
        if own and killed and report.round == 7 and os.environ["HETJAX_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def squares(w, batch, rng):
        return (batch["x"] @ w - batch["y"]) ** 2

    fields = {"epochs": 3, "microbatch_size": 4, "budget": 6, "checkpoint": {"every_rounds": 3}}
    fields |= {"data": {"sharing": "process_local"}, "workdir": directory, "progress": False}
    quota, data = hetjax.quota.static(proportions=[2.0, 1.0]), {"x": x, "y": x.sum(-1)}
    fields |= {"quota": quota, "callbacks": [on_round]}
    return hetjax.fit(squares, np.zeros(4, np.float32), optax.sgd(0.1), data, **fields)


def test_actors_with_parts_of_the_data_go_on_with_them(tmp_path):
    whole, again = (
        hetjax.ray.launch(
            functools.partial(_on_parts, tmp_path / str(killed), killed),
            resources=[{"CPU": 1}, {"CPU": 2}],
            max_failures=int(killed),
        )
        for killed in (False, True)
    )
    assert again.summary["resumed"]
    assert again.summary["examples_missing"] == again.summary["examples_duplicated"] == 0
    np.testing.assert_array_equal(again.params, whole.params)


def _fails(directory):
    own = hetjax.join_processes().process_id
    with (directory / f"calls-{own}").open("a") as file:
        file.write("called ")
    if own == 1:
        raise ZeroDivisionError("of worker 1")
    time.sleep(PATIENCE_SECS)


def test_what_the_function_raises_is_raised_here_and_not_tried_again(tmp_path):
    with pytest.raises(ZeroDivisionError, match="of worker 1") as raised:
        hetjax.ray.launch(functools.partial(_fails, tmp_path), [{"CPU": 1}] * 2, max_failures=3)
    assert 'raise ZeroDivisionError("of worker 1")' in str(raised.value)  # its traceback there
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["called "] * 2


CTRL_C = """
import pathlib, sys
from experiments.drills import engines_ray
with engines_ray.session():
    engines_ray.launched(pathlib.Path(sys.argv[1]))
"""


def test_ctrl_c_ends_the_round_saves_and_ends_all(cluster, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-c", CTRL_C, str(tmp_path)]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "rounds").exists():
        assert driver.poll() is None, driver.stderr.read()
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=PATIENCE_SECS)
    assert driver.returncode != 0
    assert "hetjax: Ctrl-C: ending after this round" in said
    assert "\nKeyboardInterrupt" in said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["interrupted"], summary["stopped_by"]) == (True, "SIGTERM")
    pids = [path.read_text() for path in tmp_path.glob("began-*")]
    ends = time.monotonic() + PATIENCE_SECS
    while left := [pid for pid in pids if pathlib.Path("/proc", pid).exists()]:
        assert time.monotonic() < ends, left
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, about its own options
def test_a_script_of_ray_train_reports_and_goes_on(tmp_path, undisturbed):
    from ray import train
    from ray.train.v2.jax import JaxTrainer

    loop = hetjax.ray.loop(functools.partial(engines_ray.work, tmp_path))
    scaling = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    failures = train.FailureConfig(max_failures=1)
    run = train.RunConfig(storage_path=str(tmp_path / "ray"), failure_config=failures)
    trainer = JaxTrainer(loop, scaling_config=scaling, run_config=run)
    with engines_ray.Disturbed(tmp_path, 20, lambda: engines_ray.kill_rank(tmp_path, 0)) as kill:
        result = trainer.fit()
    assert engines_ray.compared(tmp_path, undisturbed) == AS_UNDISTURBED
    assert kill.figures()["secs_to_first_new_round"] > 0
    summary = hetjax.load(tmp_path / "run").summary
    assert result.metrics["epoch"] == engines_ray.EPOCHS - 1
    assert result.metrics["eval/loss"] == summary["test_loss"]
    assert result.metrics["examples_missing"] == 0
    epochs = result.metrics_dataframe["epoch"].tolist()
    assert epochs == sorted(set(epochs))
    kept = hetjax.load(result.checkpoint.path)
    assert kept.summary == summary


def test_the_script_of_the_page_trains(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(test_ray_page.after(0).replace("/shared/runs", str(tmp_path / "runs")))
    options = {"cwd": tmp_path, "env": os.environ | {"RAY_ADDRESS": cluster.address}}
    done = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, **options
    )
    (printed,) = re.findall(r"^\[(\d[^]m]+)\]", done.stdout, re.MULTILINE)  # not Ray's colours
    numbers = [float(text) for text in printed.split()]
    assert numbers == pytest.approx([1.0] * 8, abs=0.1)
    assert len(hetjax.load(tmp_path / "runs/ray").summary["quotas"]) == 2
