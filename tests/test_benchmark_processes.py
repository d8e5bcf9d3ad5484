"""The benchmark of processes: what it makes of the files that its runs leave."""

import itertools
import json
import types

import pytest

from experiments.benchmarks import launched_runs, process_arms, processes
from hetjax.zoo import config


def _line(round, **fields):
    line = {
        "round": round,
        "full": True,
        "examples": 100,
        "round_secs": 2.0,
        "local_secs": 1.5,
        "waiting_fraction": 0.2,
        "quotas": [2, 1, 1],
    }
    return line | fields


def test_steady_rounds_leave_out_the_first_and_those_not_full():
    lines = [_line(0, round_secs=50.0), _line(1), _line(2, full=False, round_secs=9.0), _line(3)]
    arm = launched_runs.of_lines(lines, 1)
    assert arm == (50.0, 2.0, 0.2, 0.25, (2, 1, 1), 2.0)


def test_a_run_too_short_for_its_first_rounds_says_so():
    with pytest.raises(ValueError, match="4 rounds were done, and none of them is steady"):
        launched_runs.of_lines([_line(i) for i in range(4)], 4)


def test_steps_of_the_baseline_count_all_examples_of_the_batch():
    result = {"step_secs": [9.0, 1.0, 3.0], "examples": 100}
    assert launched_runs.of_steps(result, 1)[:2] == (50.0, 2.0)


def test_medians_have_the_range_of_several_runs():
    assert launched_runs.middle([1.0]) == "1.00"
    assert launched_runs.middle([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"


def test_a_configuration_has_the_given_fields_alone(tmp_path):
    command = launched_runs.train_command(
        tmp_path / "run",
        "data",
        microbatch_size=8,
        data={"num_train": 64},
        quota={"policy": "equal"},
    )
    given = json.loads((tmp_path / "run.json").read_text())
    assert given.keys() == {"data", "microbatch_size", "quota"}
    assert given["data"].keys() == {"name", "dir", "num_train"}
    assert given["data"]["dir"].startswith("/")
    assert f"--config={tmp_path / 'run.json'}" in command
    assert config.validate(config.load(tmp_path / "run.json")).quota.policy == "equal"


def test_two_checkouts_take_turns(tmp_path, monkeypatch):
    (tmp_path / "hetjax").mkdir()
    (tmp_path / "hetjax" / "__init__.py").touch()
    root, speeds, asked = processes._ROOT, itertools.count(100), []

    def run(task, policy, num_rounds, shares, *, checkout):
        asked.append((policy, "this" if checkout == root else "before"))
        assert checkout in (root, tmp_path)
        return launched_runs.Arm(next(speeds) * (2 if checkout == tmp_path else 1), 1.0)

    monkeypatch.setattr(process_arms, "run_hetjax", run)
    monkeypatch.setattr(processes, "_BEFORE", types.SimpleNamespace(value=tmp_path))
    monkeypatch.setattr(processes, "_REPEATS", types.SimpleNamespace(value=2))
    first, second = processes.task_rows("lenet")
    assert asked[:4] == [("adaptive", side) for side in ("before", "this", "this", "before")]
    assert "policy adaptive" in first.figure
    assert "policy equal" in second.figure
    ratios = [101 / 200, 102 / 206]
    assert first.reached.startswith(launched_runs.middle(ratios))


def test_each_policy_is_told_beside_what_both_sides_compute_alone(monkeypatch):
    """Of kernels: DDP's speed times what hetjax makes of a core over what torch does."""
    speeds = {"adaptive": 1500.0, "equal": 900.0}
    asked = []

    def run(task, policy, num_rounds, shares):
        asked.append((task.budget, task.microbatch_size, policy, shares))
        return launched_runs.Arm(700.0 if len(shares) == 1 else speeds[policy], 1.0)

    def torch(name, task, num_steps, shares, options):
        alone = 500.0 if "--plain" in options else 1000.0
        return launched_runs.Arm(alone if len(shares) == 1 else 800.0 + len(options), 1.0)

    monkeypatch.setattr(process_arms, "run_hetjax", run)
    monkeypatch.setattr(process_arms, "run_torch", torch)
    monkeypatch.setattr(process_arms, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(processes, "_REPEATS", types.SimpleNamespace(value=1))
    monkeypatch.setattr(processes, "_BEFORE", types.SimpleNamespace(value=None))
    over_equal, _, kernels, adaptive, equal = processes.task_rows("lenet")
    assert over_equal.reached == "1.67: 1,500 over 900"
    assert kernels.reached == "0.70"
    assert adaptive.reached == "2.68 of kernels; 1.87: 1,500 over 801 (as torch has it)"
    assert equal.reached == "1.61 of kernels; 1.12: 900 over 801 (as torch has it)"
    assert asked[-1] == (16, 32, "equal", (1.0,))  # a quarter of the round, by one process


def test_runs_are_counted_by_the_quotas_of_most_of_their_last_rounds(monkeypatch):
    """Single rounds of other quotas, which are trials, count for nothing."""
    best, other = [4, 2, 1, 1], [5, 2, 1, 0]
    ends = iter([[best] * 19 + [[2] * 4], [other] * 12 + [best] * 8, [best] * 20])

    def run(task, policy, num_rounds, shares, data_dir):
        assert (policy, num_rounds, shares) == ("adaptive", 70, (1.0, 0.5, 0.25, 0.25))
        quotas = [[2] * 4] * 50 + next(ends)
        return [_line(i, quotas=q, microbatches_done=q) for i, q in enumerate(quotas)]

    monkeypatch.setattr(launched_runs, "run_lines", run)
    monkeypatch.setattr(processes, "_RUNS", types.SimpleNamespace(value=3))
    monkeypatch.setattr(process_arms, "DATA_DIR", types.SimpleNamespace(value=None))
    (row,) = processes.quotas_rows()
    assert row.reached == "2 of 3 (4 2 1 1: 2; 5 2 1 0: 1)"


def test_the_baseline_has_the_models_of_hetjax():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import ddp_baseline

    sizes = {
        name: sum(p.numel() for p in ddp_baseline.make_model(name).parameters())
        for name in ("lenet", "mlp")
    }
    assert sizes == {"lenet": 62_006, "mlp": 5_256_202}
    images = torch.zeros(4, 3, 32, 32)
    assert ddp_baseline.make_model("lenet")(images).shape == (4, 10)


def test_processes_of_the_baseline_share_each_batch():
    pytest.importorskip("torch")
    from experiments.benchmarks import ddp_baseline

    parts = [
        next(ddp_baseline.own_batches(16, 8, rank=rank, num_ranks=4)).tolist() for rank in range(4)
    ]
    assert [len(part) for part in parts] == [2] * 4
    assert len({unit for part in parts for unit in part}) == 8
