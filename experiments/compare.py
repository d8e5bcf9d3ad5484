"""Runs several configurations side by side on the same delays; one picture and one table.

    python -m experiments.compare --directory=runs/gates --seeds=0,1,2 \\
        --configs=configs/fashion_mnist_delays.py \\
        --configs="configs/fashion_mnist_delays.py gate.trigger=first"

Each `--configs` is an arm: a file and, behind it, fields of it that are different; files alone may
be given in one list. `--set=FIELD=VALUE` changes a field of all arms. A sweep is a grid: with

    --grid=optimizer.learning_rate=.1,.2 --grid=microbatch_size=4,8

each arm becomes four, one a cell. With the same seed the
emulated workers of all arms are held up by the same delays, and data, model and order begin the
same. Each run leaves one JSON file in the directory and is not done again; a run that was
interrupted leaves nothing. With `--rates=…` the learning rate of each arm is tuned first, with the
first seed: the one that reaches `--target_loss` in the least time.

The training loss is that of the rounds, averaged over the last `--window` of an epoch's examples.
"Time to the loss" is the run's clock (virtual, where the configuration says so) when that average
first is at most the target: `--target_loss`, or the lowest that every run reaches. Ratios are taken
seed by seed, over the first arm, and the spread is half the distance from the least to the
greatest.
"""

import functools
import pathlib
import sys

from absl import flags

from experiments import command_line
from experiments.comparisons import comparison

_CONFIGS = flags.DEFINE_multi_string("configs", [], "An arm: 'FILE FIELD=VALUE …'; or files.")
_SET = flags.DEFINE_multi_string("set", [], "FIELD=VALUE, for all arms.")
_GRID = flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE: an arm for each cell.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of each arm.")
_RATES = flags.DEFINE_list("rates", [], "Learning rates to tune each arm over.")
_TARGET = flags.DEFINE_float("target_loss", None, "Training loss whose time is compared.")
_WINDOW = flags.DEFINE_float("window", 0.25, "Of an epoch's examples: to average the loss.", 0.0)
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time; 1 where the clock is the wall's.", 1)
_DIRECTORY = flags.DEFINE_string("directory", "runs/compare", "Results, table and picture.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}. Quote an arm with its fields.")
    directory = pathlib.Path(_DIRECTORY.value).expanduser()
    try:
        arms = comparison.read_arms(_CONFIGS.value, _SET.value, _GRID.value)
        seeds, rates = [int(s) for s in _SEEDS.value], [float(r) for r in _RATES.value]
        found = comparison.compare(
            arms,
            seeds,
            directory,
            rates=rates,
            target=_TARGET.value,
            window=_WINDOW.value,
            jobs=_JOBS.value,
        )
    except ValueError as error:
        sys.exit(str(error))
    directory.mkdir(parents=True, exist_ok=True)
    comparison.draw(directory / "compare.png", found)
    text = comparison.table(found)
    (directory / "README.md").write_text(f"![Training loss](compare.png)\n\n{text}")
    print(f"\n{text}\nPicture: {directory / 'compare.png'}")


if __name__ == "__main__":
    command_line.run(
        main, functools.partial(command_line.parse_flags, fields_by="--set="), takes_arguments=True
    )
