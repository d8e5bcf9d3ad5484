"""The driver of a whole run: rounds until the epochs are done, and what is done between them.

It evaluates, calls the user's callbacks, writes the records and keeps checkpoints. While the
workers compute a round, it reports the one before.
"""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hetjax import interrupt, types
from hetjax.processes import watch
from hetjax.records import evaluate, record, summary, telemetry
from hetjax.records import keeper as keeper_lib
from hetjax.rounds import gathering, reporting, round_report
from hetjax.rounds import run as run_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_records import RunState

Callback = Callable[[round_report.RoundReport], bool | None]

_ASK_OF_SIGNAL = {
    None: gathering.Request.NOTHING,
    signal.SIGINT: gathering.Request.END_BY_SIGINT,
    signal.SIGTERM: gathering.Request.END_BY_SIGTERM,
}
_NAME_OF_STOP = {
    gathering.Request.END: "callback",
    gathering.Request.END_BY_SIGINT: "SIGINT",
    gathering.Request.END_BY_SIGTERM: "SIGTERM",
}


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` returns; parameters as they were given, without worker axis."""

    params: types.PyTree
    """After the last round; the mean of the replicas where the reducer gossips."""
    state: types.TrainState
    """Of all workers, leaves `[num_workers, ...]`."""
    summary: dict[str, Any]
    """As `summary.json`."""
    history: list[dict[str, Any]]
    """As `metrics.jsonl`, a dict a round."""
    best_params: types.PyTree
    """At the evaluation with the lowest loss; `params` where no evaluation had a loss."""


class Driver:
    """Drives one run to its end.

    Args:
        run: whose rounds they are.
        state: where it begins.
        recorder: keeps the lines.
        evaluator: of this process, if it evaluates.
        callbacks: called with each line.
        summary: of the run so far.
        best_params: of the run so far; None: there are none.
        keeper: keeps checkpoints, if there is a workdir.
    """

    def __init__(
        self,
        run: run_lib.Run,
        state: RunState,
        *,
        recorder: record.Recorder,
        evaluator: evaluate.Evaluator | None,
        callbacks: Sequence[Callback],
        summary: summary.Summary,
        best_params: types.PyTree,
        keeper: keeper_lib.Keeper | None,
    ) -> None:
        self._run, self._state, self._recorder = run, state, recorder
        self._evaluator, self._callbacks, self._keeper = evaluator, callbacks, keeper
        self._summary, self._best_params = summary, best_params
        self._telemetry = telemetry.OrderTelemetry(run.parts)
        self._pending: reporting.Report | None = None  # not reported yet
        self._measured: dict[str, Any] = {}  # after its round: eval, consensus, herding
        self._asks = self._asked = gathering.Request.NOTHING  # of this process; of all processes

    def drive(self) -> FitResult:
        """All rounds from there on; writes the files however they end."""
        run = self._run
        params, _ = run.params(self._state)  # all processes take part
        if run.parts.leads:
            self._summary.order_cost = self._telemetry.cost(params, self._state.stream)
        with interrupt.deferred() as interrupted:
            try:
                while not run.done(self._state):
                    self._asks |= _ASK_OF_SIGNAL[interrupted()]
                    if run.parts.meeting.alone:
                        self._asked |= self._asks
                    if self._asked.ends:
                        break
                    self._round()
                if not self._asked.ends and run.is_end_of_trace(self._state):
                    self._say_end_of_trace()
                self._report()
                self._summary.stopped_by = _NAME_OF_STOP.get(self._asked & ~gathering.Request.SAVE)
                self._save()
            except reporting.NonFiniteError as error:
                error.result = self._result(interrupted=True)
                raise
            except Exception:
                with contextlib.suppress(ValueError):  # the first error is the cause
                    self._recorder.finish(self._summary.as_dict(self._state, interrupted=True))
                raise
            return self._result(interrupted=not run.all_epochs_done(self._state))

    def _result(self, *, interrupted: bool) -> FitResult:
        params = jax.device_get(self._run.params(self._state)[0])
        written = self._recorder.finish(self._summary.as_dict(self._state, interrupted=interrupted))
        best = params if self._best_params is None else self._best_params
        return FitResult(params, self._state.train, written, self._recorder.history, best)

    @watch.taking_part
    def _round(self) -> None:
        """One round, the report of the one before, and what is due after it."""
        run, stream = self._run, self._run.parts.stream
        epoch = stream.epoch(self._state.stream)
        self._state, report = run.round(self._state, request=self._asks, meanwhile=self._report)
        self._pending = report
        self._asked |= report.asked
        if (epochs_done := stream.epoch(self._state.stream)) > epoch:
            self._end_epoch(epochs_done)
        every = run.config.checkpoint.every_rounds
        if gathering.Request.SAVE in self._asked or (
            every and self._state.rounds_done % every == 0
        ):
            self._save()
        self._asked &= ~gathering.Request.SAVE
        self._asks &= ~gathering.Request.SAVE
        if self._keeper is not None and self._keeper.is_due():
            self._asks |= gathering.Request.SAVE

    @watch.taking_part
    def _report(self) -> None:
        """Reports the round before, whose numbers have arrived by now."""
        report, self._pending = self._pending, None
        measured, self._measured = self._measured, {}
        if report is None:
            return
        line = self._summary.round_done(report, **measured)
        self._recorder.add(line)
        report.check()
        beacons = self._run.beacons
        if self._callbacks:
            beacons.at("reporting", line.round)
        for callback in self._callbacks:
            if callback(line):
                self._asks |= gathering.Request.END
        beacons.at("waiting", line.round)

    def _end_epoch(self, epochs_done: int) -> None:
        """Evaluates where due; the run's clock stands still meanwhile."""
        run, config = self._run, self._run.config
        run.settle()
        params, self._measured["consensus"] = run.params(self._state)
        if run.parts.leads:
            self._measured["herding"] = self._telemetry.herding(epochs_done, params, self._state)
        if epochs_done % config.eval_every and epochs_done < config.epochs:
            return
        values = {}
        if self._evaluator is not None:
            values = {f"test_{name}": value for name, value in self._evaluator(params).items()}
        if not run.parts.reducer.keeps_replicas_equal:
            values |= self._worst()
        if self._evaluator is None:
            return
        self._measured["eval"] = values
        if self._summary.evaluated(values):
            self._best_params = jax.device_get(params)

    def _worst(self) -> dict[str, float]:
        """The metrics of the replica with the highest loss; every process gives its replicas."""
        found = []
        for worker in range(self._run.num_workers):
            replica = state_lib.worker_row(self._state.train.params, worker)
            if self._evaluator is not None:
                found.append(self._evaluator(jax.device_put(replica, self._run.parts.own_device)))
        worst = max((f for f in found if "loss" in f), key=lambda f: f["loss"], default={})
        return {f"worst_test_{name}": value for name, value in worst.items()}

    def _save(self) -> None:
        """Keeps the run as it is; the run's clock stands still meanwhile."""
        if self._keeper is None:
            return
        self._run.settle()
        self._report()
        self._run.beacons.at("checkpointing", self._state.rounds_done)
        self._keeper.save(
            self._state,
            self._best_params,
            finished=self._run.all_epochs_done(self._state),
            summary=self._summary.save(),
            examples_recomputed=self._summary.examples_recomputed,
        )

    def _say_end_of_trace(self) -> None:
        if self._run.all_epochs_done(self._state):
            return
        print(
            f"hetjax: the trace {self._run.config.replay!r} ends after {self._state.rounds_done} "
            "rounds; so does this run, before its last epoch.",
            file=sys.stderr,
        )
