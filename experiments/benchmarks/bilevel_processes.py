"""Cleaning on four real processes that get 1, 1/2, 1/4 and 1/4 of a core: adaptive over equal.

    python -m experiments.benchmarks.bilevel_processes --data_dir=DIR [--repeats=2]

DIR has the original files of Fashion-MNIST. An MLP, 10,000 polluted and 5,000 validation images, a
value gap of three steps, whole sets in each request: so both arms have the same F after each outer
step, and the ratio is that of the times until then. Run it on a machine that does nothing else; CPU
controller groups have to be allowed.
"""

import json
import pathlib
import statistics
import sys
import tempfile

from absl import app, flags

from experiments.benchmarks import launched_runs
from experiments.benchmarks import rows as rows_lib

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Of Fashion-MNIST.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Of each arm, in turns.")
_SHARES = (1.0, 0.5, 0.25, 0.25)
_STEPS = 8


def _lines(policy: str, data_dir: str) -> list[dict]:
    """The outer steps of one run."""
    workdir = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    given = {
        "data": {
            "name": "fashion_mnist",
            "dir": str(pathlib.Path(data_dir).absolute()),
            "num_train": 10_000,
            "num_validation": 5_000,
            "num_test": 1_000,
        },
        "model": {"name": "mlp"},
        "lower": {"learning_rate": 0.3, "optimizer": "sgd"},
        "upper": {"steps": _STEPS},
        "eval_every": _STEPS,
        "retrain_steps": 1,
        "estimator": {"steps": 3},
        "microbatch_size": 50,
        "cluster": {"num_workers": len(_SHARES)},
        "quota": {"policy": policy},
        "checkpoint": {"every_secs": 0.0},
    }
    path = workdir.with_suffix(".json")
    path.write_text(json.dumps(given))
    program = [sys.executable, "-m", "experiments.train_bilevel", f"--config={path}"]
    launched_runs.run_workers(_SHARES, [*program, f"--workdir={workdir}"])
    text = (workdir / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    assert _DATA_DIR.value is not None
    whole, later, losses = [], [], []
    for _ in range(_REPEATS.value):
        runs = {policy: _lines(policy, _DATA_DIR.value) for policy in ("equal", "adaptive")}
        ends = {
            policy: [line["start_secs"] + line["step_secs"] for line in lines]
            for policy, lines in runs.items()
        }
        whole.append(ends["equal"][-1] / ends["adaptive"][-1])
        settled = {policy: own[-1] - own[1] for policy, own in ends.items()}
        later.append(settled["equal"] / settled["adaptive"])
        losses.append([lines[-1]["upper_loss"] for lines in runs.values()])
        print(f"F {losses[-1]}, seconds {[own[-1] for own in ends.values()]}", file=sys.stderr)
    print(rows_lib.processor())
    print("| figure | target | reached |\n|---|---|---|")
    print(
        "| Fashion-MNIST cleaning (MLP), four processes at 1, 1/2, 1/4 and 1/4 of a core: time to "
        "the same F, equal over adaptive; from the third outer step on | ≥ 1.7 | "
        f"{_told(whole)}; {_told(later)} |"
    )
    worst = max(abs(a - b) / abs(a) for a, b in losses)
    print(f"| greatest difference between the arms' F | rounding | {worst:.1e} |")


def _told(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})"


if __name__ == "__main__":
    app.run(main)
