"""Data cleaning on unequal workers: each sum that the estimator asks for is a round."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hetjax
from experiments.bilevel import cleaning, estimators, files, models, settings
from experiments.bilevel import data as data_lib
from hetjax import bilevel
from hetjax.records import checkpoint_manager
from hetjax.records import workdir as workdir_lib
from hetjax.types import PyTree

RUN = "run"
"""The directory of the run itself, in the workdir."""


def clean(
    config: settings.TrainConfig,
    data: data_lib.Data,
    workdir: pathlib.Path | None = None,
    *,
    resume: bool | str = True,
    on_record: Callable[[dict[str, Any]], object] = lambda record: None,
) -> tuple[cleaning.Cleaned | None, hetjax.SavedRun]:
    """As `cleaning.clean`, by `hetjax.fit_bilevel`, which `workdir` and `resume` are given.

    Every process of a run of several calls it; the first is None in all but process 0, and where a
    signal ended the run.
    """
    records = _Records(config, data, workdir, on_record)
    if (
        not checkpoint_manager.begins_anew(resume)
        and (saved := _at_its_end(config, workdir)) is not None
    ):
        return records.cleaned(saved), saved
    net = models.net(config, data)
    y0 = net.params
    x: PyTree = bilevel.PerExample(np.zeros(config.data.num_train, np.float32))
    if estimators.learns_start(config):
        x = bilevel.Learned(x, y0)
    result = hetjax.fit_bilevel(
        cleaning.make_problem_of_rows(config.lower.ridge, net.losses),
        x,
        y0,
        estimators.make(config),
        estimators.make_upper(config),
        upper_source=data.validation,
        lower_source=data.train,
        outer_steps=config.upper.steps,
        upper=_budget(config.sums.upper),
        lower=_budget(config.sums.lower),
        callbacks=[records],
        eval_every=config.eval_every,
        eval_sources={"validation": data.validation, "test": data.test},
        metrics_fn=lambda y, batch: {"accuracy": net.right(y, batch), "loss": net.losses(y, batch)},
        writers=hetjax.writers.by_names(config.writers),
        workdir=None if workdir is None else workdir / RUN,
        resume=resume,
        progress=False,
        raise_on_interrupt=False,
        **settings.of_rounds(config),
    )
    is_over = not (jax.process_index() or result.summary["interrupted"])
    return records.cleaned(result) if is_over else None, result


def _at_its_end(
    config: settings.TrainConfig, workdir: pathlib.Path | None
) -> hetjax.SavedRun | None:
    """The run in a workdir, if its hypergradients are done and what comes after is missing."""
    if workdir is None or (workdir / "summary.json").is_file() or jax.process_count() > 1:
        return None
    if not (workdir / RUN / "summary.json").is_file():
        return None
    saved = hetjax.load(workdir / RUN)
    is_over = saved.summary["outer_steps"] == config.upper.steps
    return saved if is_over and not saved.summary["interrupted"] else None


def lines_of(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The rounds of both levels of the run in a workdir, in order."""
    paths = (workdir / RUN / f"{name}_rounds.jsonl" for name in ("upper", "lower"))
    found = [line for path in paths for line in workdir_lib.whole_lines(path)[0]]
    return sorted(found, key=lambda line: line["start_secs"])


def _budget(num_microbatches: int) -> dict[str, Any]:
    return {"budget": num_microbatches} if num_microbatches else {}


class _Records:
    """A callback that makes the records of a cleaning run, and keeps the best."""

    def __init__(
        self,
        config: settings.TrainConfig,
        data: data_lib.Data,
        workdir: pathlib.Path | None,
        on_record: Callable[[dict[str, Any]], object],
    ) -> None:
        self._config, self._data, self._on_record = config, data, on_record
        self._path = None if workdir is None else workdir / "metrics.jsonl"
        self._history: list[dict[str, Any]] | None = None  # None: no step was seen yet

    def __call__(self, line: hetjax.OuterReport) -> None:
        if self._path is not None and not (line.step or jax.process_index()):
            for name in (self._path.name, "summary.json", "report.html"):  # of the run before
                self._path.with_name(name).unlink(missing_ok=True)
        if line.eval is None:
            return
        if self._history is None:
            self._history = self._kept(line.step)
        weights = np.asarray(cleaning.weights_of(line.x()))
        steps = line.step + 1
        numbers = {
            name: value
            for name in ("gap", "residual", "multiplier", "step_chosen")
            if (value := getattr(line.info, name)) is not None
        }
        found = {
            "step": steps,
            "train_secs": line.times.start_secs + line.times.step_secs,
            "validation_loss": line.eval["validation_loss"],
            "lower_loss": line.info.lower_loss,
            **numbers,
            "test_accuracy": line.eval["test_accuracy"],
            "validation_accuracy": line.eval["validation_accuracy"],
            **cleaning.told_apart(weights, self._data),
        }
        self._history.append(found)
        if self._path is not None:
            text = "".join(json.dumps(each) + "\n" for each in self._history)
            files.write_whole(self._path, text)
        self._on_record(found)

    def _kept(self, first_step: int) -> list[dict[str, Any]]:
        """The records of the steps before the first that is seen, of a run that goes on."""
        if self._path is None or not first_step:
            return []
        return [x for x in workdir_lib.whole_lines(self._path)[0] if x["step"] <= first_step]

    def cleaned(self, result: hetjax.SavedRun) -> cleaning.Cleaned:
        history = self._history
        if history is None:  # the run was at its end already
            history = [] if self._path is None else workdir_lib.whole_lines(self._path)[0]
        cost = result.summary["cost_of_a_hypergradient"]
        own = bilevel.Cost(**cost)
        for found in history:
            steps = found["step"]
            found["gradients"] = steps * own.gradients
            found["products"] = steps * (own.hessian_products + own.cross_products)
            found["work"] = steps * cleaning.work(own)
        # That with the lowest F, whose x and y the run has kept.
        chosen = [x for x in history if x["step"] == result.summary.get("best_step", -1) + 1]
        best = None
        if chosen and math.isfinite(chosen[0]["validation_loss"]):
            x, y = result.best_params["x"], result.best_params["y"]
            weights = np.asarray(cleaning.weights_of(x))
            best = chosen[0]["validation_loss"], weights, y, chosen[0]
        names = ("rounds", "levels", "kinds", "waiting_fraction", "num_workers", "emulated")
        more = {
            "compile_secs": result.summary["start"]["first_step"],
            **{name: result.summary[name] for name in names},
        }
        return cleaning.ended(self._config, self._data, best, history, own, more)
