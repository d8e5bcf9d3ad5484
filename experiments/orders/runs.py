"""A run of the study: opens its task, trains, and says what came of it."""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import hetjax
from experiments import tasks as tasks_lib
from experiments.orders.tasks import Run
from hetjax.data import sources
from hetjax.zoo import config as config_lib
from hetjax.zoo import datasets, optimizers


class Opened(NamedTuple):
    """What a run trains with."""

    config: config_lib.ExperimentConfig
    task: tasks_lib.Task
    evals: Mapping[str, sources.Source]  # a part of the training set, and the set that is evaluated

    def arguments(self) -> dict[str, Any]:
        """Of `hetjax.fit` and `hetjax.Run`."""
        train = self.task.train
        optimizer = optimizers.make_optimizer(self.config, num_examples=len(train))
        return {
            "loss_fn": self.task.loss_fn,
            "params": self.task.params,
            "optimizer": optimizer,
            "source": train,
            "config": self.config,
            **self.task.given,
        }


def open_run(run: Run, data_dir: str | None, changes: Mapping[str, Any] | None = None) -> Opened:
    """The configuration, with further changes of dotted fields, model and data of a run."""
    config = run.task.configured(run, data_dir, changes)
    task = tasks_lib.make(config, _opened(config.data))
    name, evaluated = next(iter(task.evals.items()))
    sets = {
        "train": _every(task.train, run.task.every),
        name: tasks_lib.first(evaluated, run.task.num_eval or len(evaluated)),
    }
    return Opened(config, task, sets)


@functools.lru_cache(maxsize=1)
def _opened(data: config_lib.DataConfig) -> datasets.Dataset:
    """In memory, and kept for the other runs of a task."""
    found = tasks_lib.load(data)
    train = sources.load_all(tasks_lib.first(found.train, data.num_train))
    evals = {name: sources.load_all(source) for name, source in found.evals.items()}
    return dataclasses.replace(found, train=train, evals=evals)


def _every(source: Any, step: int) -> sources.Source:
    arrays = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf[::step]), source.arrays)
    return sources.ArraySource(arrays)


def train(run: Run, data_dir: str | None) -> dict[str, Any]:
    """Does a run.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    started, diverged = time.perf_counter(), False
    opened = open_run(run, data_dir)
    try:
        result = hetjax.fit(
            **opened.arguments(),
            eval_sources=opened.evals,
            metrics_fn=opened.task.metrics_fn,
            progress=False,
        )
    except hetjax.NonFiniteError as error:
        result, diverged = error.result, True
    evals = [line["eval"] for line in result.history if line.get("eval")]
    metric = f"{list(opened.evals)[1]}_{run.task.metric}"
    for name in ("train_loss", metric):
        if evals and name not in evals[0]:
            raise ValueError(f"metrics: orders are judged by {name}, and got {', '.join(evals[0])}")
    losses = [value["train_loss"] for value in evals]
    return (
        named(run)
        | {
            "diverged": diverged or any(loss is None or not math.isfinite(loss) for loss in losses),
            "epochs": opened.config.epochs,
            "train_losses": [rounded(loss) for loss in losses],  # after each epoch
            "metric": metric,
            "metric_values": [rounded(value[metric]) for value in evals],
            "quotas": _changes(result.history)[:30],  # (first round, quotas)
            "rounds": result.summary["rounds"],
            "examples_missing": result.summary["examples_missing"],
            "examples_duplicated": result.summary["examples_duplicated"],
            "secs": round(time.perf_counter() - started, 1),
            "jax": jax.__version__,
        }
    )


def named(run: Run) -> dict[str, Any]:
    """What a result begins with."""
    return {
        "task": run.task.name,
        "arm": run.arm,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "settings": run.task.settings,
    }


def rounded(value: float | None) -> float | None:
    """Six digits; None for what is not finite, which JSON has not."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _changes(history: Any) -> list[tuple[int, list[int]]]:
    """The rounds from which on the quotas were others, and these; rounds cut short left out."""
    quotas = [(line["round"], line["quotas"]) for line in history if line["full"]]
    pairs = zip([(0, None), *quotas], quotas, strict=False)
    return [new for old, new in pairs if old[1] != new[1]]
