"""The benchmark of processes: what it makes of the files that its runs leave."""

import types

from experiments.benchmarks import launched_runs, process_arms, processes, rows


def _line(round, **fields):
    line = {"round": round, "full": True, "examples": 100, "round_secs": 2.0, "local_secs": 1.5}
    return line | {"waiting_fraction": 0.2, "quotas": [2, 1, 1]} | fields


def test_steady_rounds_leave_out_the_first_and_those_not_full():
    lines = [_line(0, round_secs=50.0), _line(1), _line(2, full=False, round_secs=9.0), _line(3)]
    arm = launched_runs.of_lines(lines, 1)
    assert arm == (50.0, 2.0, 0.2, 0.25, (2, 1, 1), 2.0)


def test_steps_of_the_baseline_count_all_examples_of_the_batch():
    result = {"step_secs": [9.0, 1.0, 3.0], "examples": 100}
    assert launched_runs.of_steps(result, 1)[:2] == (50.0, 2.0)


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
    found = list(processes.task_rows("lenet"))
    figures = {row.name: row.figure for row in found if isinstance(row, rows.Row)}
    assert figures["adaptive: examples a second"] == "1,500"
    assert figures["adaptive over equal split"] == "1.67"
    assert figures["kernels: hetjax over torch, one core"] == "0.70"
    assert figures["adaptive over DDP"] == "1.87"
    assert figures["adaptive over DDP, of kernels"] == "2.68"
    assert figures["equal over DDP"] == "1.12"
    assert figures["equal over DDP, of kernels"] == "1.61"
    assert "the faster one, plain DDP." in "\n".join(rows.table(found))
    assert asked[-1] == (16, 32, "equal", (1.0,))  # a quarter of the round, by one process
