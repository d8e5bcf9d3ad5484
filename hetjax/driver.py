"""The driver of a whole run: rounds until the epochs are done, and what is done between them.

It evaluates, calls the user's callbacks, writes the records and keeps checkpoints. While the
workers compute a round, it reports the one before.
"""

import contextlib
import dataclasses
import enum
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hetjax import interrupt, parts, types
from hetjax.processes import watch
from hetjax.records import evaluations, record, results, summary, telemetry
from hetjax.records import keeper as keeper_lib
from hetjax.rounds import gathering, reporting, resume, round_report
from hetjax.rounds import run as run_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_records import RunState

Callback = Callable[[round_report.RoundReport], Any]
"""Called with the report of each round; see `STOP`."""

ASK_OF_SIGNAL = {
    None: gathering.Request.NOTHING,
    signal.SIGINT: gathering.Request.END_BY_SIGINT,
    signal.SIGTERM: gathering.Request.END_BY_SIGTERM,
}
_SIGNALS = {
    gathering.Request.END_BY_SIGTERM: "SIGTERM",
    gathering.Request.END_BY_SIGINT: "SIGINT",
}


def signal_of(asked: gathering.Request) -> str:
    """The signal that ends a run; '' where none does."""
    return next((name for request, name in _SIGNALS.items() if request in asked), "")


class _Stop(enum.Enum):
    STOP = "hetjax.STOP"


STOP = _Stop.STOP
"""A callback that returns it, or True, ends the run after the round that is computing."""


class Callbacks:
    """The user's callbacks, one after the other; any of them may end the run.

    Args:
        callbacks: called with each line.
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = callbacks
        self._passed_over: set[int] = set()  # callbacks whose answer is
        self.stopper = ""  # the one that ended the run, in this process

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __call__(self, line: Any) -> bool:
        """Whether one of them ends the run; says once what else one answers."""
        ends = False
        for callback in self._callbacks:
            answer = callback(line)
            name = getattr(callback, "__name__", type(callback).__name__)
            is_truth = getattr(answer, "dtype", None) == np.bool_ and answer.size == 1
            says = isinstance(answer, bool) or is_truth
            if answer is STOP or (says and answer):
                ends, self.stopper = True, self.stopper or name
            elif answer is not None and not says and id(callback) not in self._passed_over:
                self._passed_over.add(id(callback))
                print(
                    f"hetjax: callback {name} returned {parts.shown(answer)}, which is passed "
                    "over: only True or hetjax.STOP ends the run",
                    file=sys.stderr,
                )
        return ends


class Driver:
    """Drives one run to its end.

    Args:
        run: whose rounds they are.
        state: where it begins.
        best_params: of the run so far; None: there are none.
        recorder: keeps the lines.
        evaluate: the sets, in the process that evaluates.
        callbacks: called with each line.
        summary: of the run so far.
        keeper: keeps checkpoints, if there is a workdir.
    """

    def __init__(
        self,
        run: run_lib.Run,
        state: RunState,
        best_params: types.PyTree,
        *,
        recorder: record.Recorder,
        evaluate: evaluations.Evaluations,
        callbacks: Sequence[Callback],
        summary: summary.Summary,
        keeper: keeper_lib.Keeper | None,
    ) -> None:
        self._run, self._state, self._recorder = run, state, recorder
        self._evaluate, self._callbacks, self._keeper = evaluate, Callbacks(callbacks), keeper
        self._summary, self._best_params = summary, best_params
        self._telemetry = telemetry.OrderTelemetry(run.parts)
        self._pending: reporting.Report | None = None  # not reported yet
        self._measured: dict[str, Any] = {}  # after its round: eval, consensus, herding
        self._asks = self._asked = gathering.Request.NOTHING  # of this process; of all processes
        self._evaluated_at = -1  # rounds that were done then
        self._told_of_weights = False

    def drive(self) -> results.FitResult:
        """All rounds from there on; writes the files however they end."""
        run = self._run
        params, _ = run.params(self._state)  # all processes take part
        if run.parts.leads:
            self._summary.order_cost = self._telemetry.cost(params, self._state.stream)
        with interrupt.deferred() as interrupted:
            try:
                while not (run.done(self._state) or self._summary.stopped_by):
                    self._asks |= ASK_OF_SIGNAL[interrupted()]
                    if run.parts.meeting.alone:
                        self._asked |= self._asks
                    if self._asked.ends:
                        break
                    self._round()
                if not self._asked.ends and run.is_end_of_trace(self._state):
                    self._say_end_of_trace()
                if not self._by_signal:
                    self._evaluate_at_end()
                self._report()
                run.parts.feed.compare(-1)  # what the last callback has changed, too
                self._say_who_stopped()
                self._save()
            except reporting.NonFiniteError as error:
                error.result = self._result(interrupted=True)
                raise
            except Exception:
                with contextlib.suppress(ValueError):  # the first error is the cause
                    self._recorder.finish(self._summary.as_dict(self._state, interrupted=True))
                raise
            return self._result(interrupted=not self._is_finished)

    @property
    def _by_signal(self) -> str:
        """The signal that ended the run; '' where none did."""
        return signal_of(self._asked)

    @property
    def _is_finished(self) -> bool:
        """Whether the run is at its end, which a callback may have said; no signal says it."""
        ended = gathering.Request.END in self._asked or bool(self._summary.stopped_by)
        return self._run.is_complete(self._state) or (ended and not self._by_signal)

    def _say_who_stopped(self) -> None:
        run, state = self._run, self._state
        if self._by_signal:
            self._summary.stopped_by = self._by_signal
        elif gathering.Request.END in self._asked:
            self._summary.stopped_by = f"callback {self._callbacks.stopper}".strip()
        if run.parts.leads and self._asked.ends:
            epochs = state.stream.examples_processed / run.parts.stream.num_examples
            goes_on = self._by_signal and self._keeper is not None
            more = "; the same call goes on from there" if goes_on else ""
            print(
                f"hetjax: {self._summary.stopped_by} ended the run after {state.rounds_done} "
                f"rounds, {epochs:.4g} of {run.config.epochs} epochs{more}.",
                file=sys.stderr,
            )

    def _result(self, *, interrupted: bool) -> results.FitResult:
        params = jax.device_get(self._run.params(self._state)[0])
        written = self._recorder.finish(self._summary.as_dict(self._state, interrupted=interrupted))
        return results.FitResult(
            params=params,
            best_params=params if self._best_params is None else self._best_params,
            summary=written,
            history=self._recorder.history,
            config=self._recorder.config,
            workdir=self._recorder.workdir,
            state=self._state.train,
        )

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
        elif is_due(self._state.rounds_done, run.config.eval_every_rounds):
            self._evaluate_between_epochs()
        if gathering.Request.SAVE in self._asked or is_due(
            self._state.rounds_done, run.config.checkpoint.every_rounds
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
        if line.weight_sum is not None and self._run.parts.leads and not self._told_of_weights:
            self._told_of_weights = True
            print(
                f"hetjax: round {line.round}: the weights of its examples add up to "
                f"{line.weight_sum:g}, so it made no update. summary['rounds_without_update'] "
                "counts such rounds; look at the weights that the loss returns",
                file=sys.stderr,
            )
        beacons = self._run.beacons
        if self._callbacks:
            beacons.at("reporting", line.round)
            self._call_back(line)
        beacons.at("waiting", line.round)

    def _call_back(self, line: round_report.RoundReport) -> None:
        """Calls the callbacks; while they run, the line has the parameters after its round."""
        state: RunState | None = self._state

        def params() -> types.PyTree:
            if state is None:
                return line.params()  # raises
            if self._run.parts.reducer.keeps_replicas_equal:
                return jax.device_get(state_lib.own_row(state.train.params))
            return state_lib.own_mean(state.train.params)

        if self._callbacks(dataclasses.replace(line, params=params)):
            self._asks |= gathering.Request.END
        state = None  # its buffers are the next round's

    def _end_epoch(self, epochs_done: int) -> None:
        """Measures the order and the replicas, and evaluates where due."""
        run, config = self._run, self._run.config
        run.settle()
        params, self._measured["consensus"] = run.params(self._state)
        if run.parts.leads:
            self._measured["herding"] = self._telemetry.herding(epochs_done, params, self._state)
        if not epochs_done % config.eval_every or epochs_done >= config.epochs:
            self._evaluate_at(params)

    def _evaluate_between_epochs(self) -> None:
        """Evaluates, but what is evaluated already."""
        if self._evaluated_at != self._state.rounds_done:
            self._run.settle()
            self._evaluate_at(self._run.params(self._state)[0])

    def _evaluate_at(self, params: types.PyTree) -> None:
        """Evaluates the parameters as they are; the run's clock stands still meanwhile."""
        run, self._evaluated_at = self._run, self._state.rounds_done
        values = self._evaluate(params, after=f"{self._evaluated_at} rounds")
        if not run.parts.reducer.keeps_replicas_equal:
            values |= self._worst()
        if not self._evaluate:
            return
        self._measured["eval"] = values
        if self._summary.evaluated(values):
            self._best_params = jax.device_get(params)

    def _evaluate_at_end(self) -> None:
        """Evaluates the last parameters, where the run ends before its last epoch does."""
        if self._pending is not None and not self._run.is_end_of_trace(self._state):
            self._evaluate_between_epochs()

    def _worst(self) -> dict[str, float]:
        """The metrics of the replica with the highest loss; every process gives its replicas."""
        found = []
        for worker in range(self._run.num_workers):
            replica = state_lib.worker_row(self._state.train.params, worker)
            if self._evaluate:
                placed = jax.device_put(replica, self._run.parts.own_device)
                after = f"{self._evaluated_at} rounds, worker {worker}"
                found.append(self._evaluate(placed, after=after))
        return self._evaluate.worst(found)

    def _save(self) -> None:
        """Keeps the run as it is; the run's clock stands still meanwhile."""
        if self._keeper is None:
            return
        run, state = self._run, self._state
        run.settle()
        self._report()
        run.beacons.at("checkpointing", state.rounds_done)
        self._keeper.save(
            resume.to_arrays(state, self._best_params, run.parts),
            done=state.rounds_done,
            params=run.parts.state.params,
            best_params=self._best_params,
            finished=self._is_finished,
            stopped_by=self._summary.stopped_by,
            quota=resume.policy_of(run.parts),
            summary=self._summary.save(),
            examples_recomputed=self._summary.examples_recomputed,
        )

    def _say_end_of_trace(self) -> None:
        if self._run.is_complete(self._state):
            return
        print(
            f"hetjax: the trace {self._run.config.replay!r} ends after {self._state.rounds_done} "
            "rounds; so does this run, before its last epoch.",
            file=sys.stderr,
        )


def is_due(rounds_done: int, every: int) -> bool:
    """Whether something that is done every so many rounds, or outer steps, is done now."""
    return every > 0 and rounds_done % every == 0
