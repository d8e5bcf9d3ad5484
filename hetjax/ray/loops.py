"""`loop`: the training function of a Ray Train script, joined and reported."""

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from hetjax import extras
from hetjax.comm import join
from hetjax.ray import joining
from hetjax.writers import hearing, naming, records

logger = logging.getLogger(__name__)


def loop(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The training function of a Ray Train script, joined to the other workers and reported.

    In the `JaxTrainer`'s workers it joins the processes, if Ray has not done so, and calls `fn`. At
    the end of each epoch it reports the last round's numbers to Ray, by the names that trackers
    have; of `hetjax.fit_bilevel` at each outer step. At the end it reports the numbers of the
    summary, and the workdir as the checkpoint.

    Ray calls `fn` outside the main thread, where Python handles no signals. So SIGTERM ends
    a worker at once, and the next one goes on from the last checkpoint in the workdir.

    Args:
        fn: as `JaxTrainer` takes it, without arguments or with the configuration. It calls
            `hetjax.fit` with a workdir that all nodes see.

    Returns:
        What to hand to `JaxTrainer` in place of `fn`.

    Raises:
        ModuleNotFoundError: Ray is missing; says how to get it.

    Example:
        >>> trainer = JaxTrainer(  # doctest: +SKIP
        ...     hetjax.ray.loop(train),
        ...     scaling_config=ray.train.ScalingConfig(num_workers=4),
        ...     run_config=ray.train.RunConfig(
        ...         failure_config=ray.train.FailureConfig(max_failures=3)
        ...     ),
        ... )
        >>> trainer.fit().metrics["train/loss"]  # doctest: +SKIP
        0.31
    """
    extras.require("ray", extra="ray")

    @functools.wraps(fn)
    def train_loop_per_worker(*config: Any) -> None:
        import jax
        from ray import train
        from ray.train import collective

        context, reports = train.get_context(), _Reports()
        own, size = context.get_world_rank(), context.get_world_size()
        if not jax.distributed.is_initialized():
            address = joining.own_address() if own == 0 else None
            join.join_processes(own, size, collective.broadcast_from_rank_zero(address))
        with hearing.heard_by(reports):
            fn(*config)
        reports.end(leads=own == 0)

    return train_loop_per_worker


class _Reports:
    """What Ray is told of a run; all workers report the same number of times, as Ray asks."""

    def __init__(self) -> None:
        self._last: tuple[records.RunInfo, Any] | None = None

    def __call__(self, run: records.RunInfo, report: Any) -> None:
        """Reports the epoch before this one."""
        if self._last is not None and _part(report) != _part(self._last[1]):
            from ray import train

            train.report(self._numbers())
        self._last = run, report

    def end(self, *, leads: bool) -> None:
        """Reports the last epoch, and in process 0 what the run has left.

        Args:
            leads: this is process 0.
        """
        from ray import train

        numbers, workdir = self._numbers(), None if self._last is None else self._last[0].workdir
        checkpoint = None
        if leads and workdir is not None:
            summary = json.loads((workdir / "summary.json").read_text())
            numbers |= {k: v for k, v in summary.items() if isinstance(v, int | float)}
            checkpoint = train.Checkpoint.from_directory(str(workdir))
        elif leads:
            logger.warning(
                "Ray's Result gets no checkpoint: give hetjax.fit workdir=DIR, on a disk that all "
                "nodes see"
            )
        train.report(numbers, checkpoint=checkpoint)

    def _numbers(self) -> dict[str, float]:
        if self._last is None:
            return {}
        run, report = self._last
        return {**naming.scalars(report.to_plain(), run.sets), "epoch": _part(report)}


def _part(report: Any) -> int:
    """The epoch of a round; an outer step is one of its own."""
    return report.epoch if hasattr(report, "epoch") else report.step
