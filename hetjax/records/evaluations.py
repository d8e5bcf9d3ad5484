"""The sets that a run is evaluated on, and which evaluation is the best."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hetjax import executor, types
from hetjax.data import sources
from hetjax.records import evaluate

logger = logging.getLogger(__name__)

ALONE = "test"  # the name of a set that was given without one
_AVERAGE = "ema_"  # before the name of a metric of the average


class Judge(NamedTuple):
    """Which of two evaluations is better."""

    metric: str | None = None  # with its set's name before it; None: nothing says
    highest: bool = False
    of_average: bool = False  # of the parameters, by `ema`

    def is_better(self, values: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than the best so far; one that is not finite never is."""
        if self.metric is None or not np.isfinite(values.get(self.metric, np.nan)):
            return False
        other = best.get(self.metric, -np.inf if self.highest else np.inf)
        return values[self.metric] > other if self.highest else values[self.metric] < other


def judge(names: Mapping[str, list[str]], best_by: str, best_mode: str) -> Judge:
    """What makes an evaluation the best.

    Args:
        names: of the metrics, of each set.
        best_by: a metric, of the first set or with a set's name before it, `val_accuracy`; '':
            the loss, if there is one.
        best_mode: 'min' or 'max'.

    Raises:
        ValueError: there is no such metric.
    """
    if not names:
        if best_by:
            raise ValueError(f"best_by: got {best_by!r}, and nothing is evaluated")
        return Judge()
    full = {f"{set_name}_{name}": name for set_name, of_set in names.items() for name in of_set}
    first = next(iter(names))
    metric = best_by or "loss"
    found = next((name for name in (f"{first}_{metric}", metric) if name in full), None)
    if found is None and best_by:
        raise ValueError(f"best_by: got {best_by!r}, and the metrics are {', '.join(full)}")
    if found is None:
        logger.warning(
            f"the metrics ({', '.join(full)}) have no loss, so best_params will be the last ones; "
            "best_by and best_mode say otherwise"
        )
    return Judge(found, best_mode == "max", full.get(found or "", "").startswith(_AVERAGE))


def worst(names: Mapping[str, list[str]], found: list[dict[str, float]]) -> dict[str, float]:
    """Of several replicas' evaluations the one with the highest loss of the first set.

    A loss that is NaN is the highest.

    Args:
        names: as of `judge`.
        found: an evaluation of each.
    """
    loss = f"{next(iter(names), '')}_loss"
    known = [values for values in found if loss in values]
    highest = max(known, key=lambda values: np.nan_to_num(values[loss], nan=np.inf), default={})
    return {f"worst_{name}": value for name, value in highest.items()}


def sets_of(
    source: Any, sets: Mapping[str, Any] | None, metrics_fn: Any, *, caller: str = "fit"
) -> dict[str, Any]:
    """The sets that are evaluated, by name: `eval_source=` or `eval_sources=`, checked.

    Raises:
        ValueError: both are given, or none where there is a metrics_fn, or one is no source.
    """
    if source is not None and sets is not None:
        raise ValueError(f"{caller}: give eval_source= or eval_sources=, not both")
    if sets is not None and (not isinstance(sets, Mapping) or not sets):
        raise ValueError(f"{caller}: eval_sources must be a dict of sets by name")
    given = sets if sets is not None else {} if source is None else {ALONE: source}
    if metrics_fn is not None and not given:
        raise ValueError(f"{caller}: metrics_fn is given, and no eval_source=")
    sets = {name: sources.as_source(each) for name, each in given.items()}
    for each in sets.values():
        sources.read(each, 0)  # or a wrong example is told after everything is compiled
    return sets


class Evaluations:
    """One evaluator for each set; the first metric that is not finite is told.

    Only a process that evaluates, or may have to later, has any.

    Args:
        setup: of the run.
        metrics_fn: as of `evaluate.evaluate`; None: the loss.
        sets: from `sets_of`.
        params: of the form that is evaluated.
        progress: say what takes long.
    """

    def __init__(
        self,
        setup: Any,
        metrics_fn: evaluate.MetricsFn | None,
        sets: Mapping[str, Any],
        params: types.PyTree,
        *,
        progress: bool,
    ) -> None:
        options, config, self._setup = {}, setup.config, setup
        if metrics_fn is None:
            own_keys = setup.per_example_rng
            metrics_fn = evaluate.metrics_of_loss(setup.loss_fn, per_example_rng=own_keys)
            if config.loss_over == "microbatch":  # which compares as many as in training
                options["batch_size"] = config.microbatch_size
        with executor.of(config.form):
            self._of_sets = {
                name: evaluate.Evaluator(
                    metrics_fn,
                    source,
                    params,
                    setup.where.own_place,
                    layout=setup.where.layout,
                    named=setup.own_named,
                    on_batch=lambda: setup.company.heartbeats.at("evaluating"),
                    num_readers=config.data.readers,
                    progress=progress,
                    **options,
                )
                for name, source in (sets.items() if setup.where.may_lead else ())
            }
        if self and config.data.sharing == "process_local":
            logger.info("process 0 evaluates the examples that it was given, and no others")
        self._has_told = False
        self._prefixes = ("", _AVERAGE) if config.ema > 0 else ("",)
        self.names = {  # of the metrics, of each set
            set_name: [prefix + name for prefix in self._prefixes for name in evaluator.names]
            for set_name, evaluator in self._of_sets.items()
        }

    def __bool__(self) -> bool:
        return bool(self._of_sets) and self._setup.where.leads

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Of each set, and of the metrics of it, by words."""
        of_sets = [evaluator.digests(name) for name, evaluator in self._of_sets.items()]
        return {name: digest for of_set in of_sets for name, digest in of_set.items()}

    def __call__(
        self,
        params: types.PyTree,
        values: types.PyTree = (),
        *,
        after: str,
        average: types.PyTree = None,
    ) -> dict[str, float]:
        """`{set_metric: mean over the set}`.

        Args:
            params: without worker axis.
            values: that metrics may ask for, now.
            after: what was done before, such as 'round 3', for what is told.
            average: of the parameters, in the same form; its metrics are `set_ema_metric`. None:
                there is none.
        """
        with executor.of(self._setup.config.form):
            found = {
                f"{set_name}_{prefix}{name}": value
                for set_name, evaluator in self._of_sets.items()
                for prefix, model in zip(self._prefixes, (params, average), strict=False)
                if model is not None
                for name, value in evaluator(model, values).items()
            }
        odd = [f"{name} {value}" for name, value in found.items() if not np.isfinite(value)]
        if odd and not self._has_told:
            self._has_told = True
            logger.warning(
                f"evaluated after {after}: {', '.join(odd)}; such a number is null in summary.json "
                "and metrics.jsonl, and never the best"
            )
        return found
