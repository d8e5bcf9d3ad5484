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

from hetjax import messages
from hetjax.writers.background import sending as sending
from hetjax.writers.csv_file import csv as csv
from hetjax.writers.mlflow_store import mlflow as mlflow
from hetjax.writers.records import Ended as Ended
from hetjax.writers.records import Record as Record
from hetjax.writers.records import RunInfo as RunInfo
from hetjax.writers.records import Writer as Writer
from hetjax.writers.tensorboard_events import tensorboard as tensorboard
from hetjax.writers.weights_and_biases import wandb as wandb

WRITERS: dict[str, Callable[..., Writer]] = {
    factory.__name__: factory for factory in (tensorboard, wandb, mlflow, csv)
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
    with messages.as_mistake("writers: ", ModuleNotFoundError):
        return [WRITERS[name]() for name in names]
