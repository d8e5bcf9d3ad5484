"""Trackers: the lines of a run, handed to TensorBoard, Weights & Biases, MLflow, CSV, or your own.

`fit(…, writers=[hetjax.writers.tensorboard("runs/mine")])` hands the line of every round to each
writer, in a thread of its own; `fit_bilevel` that of every outer step. In several processes only
process 0 has writers. No tracker is imported before a run begins.

- `records` says what a writer is given: an object with `write` and `close`, which may be your own.
- `naming` names the numbers of a line; `background` is the thread, and what a slow writer gets.
- `tensorboard_events`, `weights_and_biases`, `mlflow_store` and `csv_file` hold the factories.
- `hearing` has all runs of a context heard, in every process.
- `kept` remembers in a workdir which run of a tracker goes on.
"""

from collections.abc import Callable, Iterable

from hetjax.writers.background import sending
from hetjax.writers.csv_file import csv
from hetjax.writers.mlflow_store import mlflow
from hetjax.writers.records import Ended, Record, RunInfo, Writer
from hetjax.writers.tensorboard_events import tensorboard
from hetjax.writers.weights_and_biases import wandb

WRITERS: dict[str, Callable[..., Writer]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "csv": csv,
}
"""The factories, by the names that `--config.writers=…` takes."""


def by_names(names: Iterable[str]) -> list[Writer]:
    """Writers of these names in `WRITERS`, which write below the workdir of their run.

    Args:
        names: str, each a key of `WRITERS`.

    Returns:
        A writer for each name, in their order.

    Raises:
        ValueError: a package of one is missing; says how to get it.

    Example:
        >>> [writer.every_secs for writer in by_names(["csv"])]
        [0.0]
    """
    try:
        return [WRITERS[name]() for name in names]
    except ModuleNotFoundError as error:
        raise ValueError(f"writers: {error}") from error


__all__ = [
    "WRITERS",
    "Ended",
    "Record",
    "RunInfo",
    "Writer",
    "by_names",
    "csv",
    "mlflow",
    "sending",
    "tensorboard",
    "wandb",
]
