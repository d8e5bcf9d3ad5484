"""Trackers: the lines of a run, handed to TensorBoard, Weights & Biases, MLflow, CSV, or your own.

`fit(…, writers=[hetjax.writers.tensorboard("runs/mine")])` hands the line of every round to each
writer, in a thread of its own; `fit_bilevel` that of every outer step. In several processes only
process 0 has writers. No tracker is imported before a run begins.

- `records` says what a writer is given: an object with `write` and `close`, which may be your own.
- `naming` names the numbers of a line; `background` is the thread, and what a slow writer gets.
- `tensorboard_events`, `weights_and_biases`, `mlflow_store` and `csv_file` hold the factories.
- `kept` remembers in a workdir which run of a tracker goes on.
"""

from hetjax.writers.background import sending
from hetjax.writers.csv_file import csv
from hetjax.writers.mlflow_store import mlflow
from hetjax.writers.records import Ended, Record, Run, Writer
from hetjax.writers.tensorboard_events import tensorboard
from hetjax.writers.weights_and_biases import wandb

WRITERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "csv": csv}
"""The factories, by the names that `--config.writers=…` takes."""

__all__ = [
    "WRITERS",
    "Ended",
    "Record",
    "Run",
    "Writer",
    "csv",
    "mlflow",
    "sending",
    "tensorboard",
    "wandb",
]
