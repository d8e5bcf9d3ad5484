"""Training as the driver's task: a step is a round, and an epoch's end is the time to measure."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import report, reported, types
from hetjax.checkpoints import checkpoint, leaves
from hetjax.comm import allgather_work
from hetjax.records import evaluations, results, workdir
from hetjax.records import summary as summary_lib
from hetjax.rounds import judged, programs, resume, round_report
from hetjax.rounds import run as run_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_state import RunState
from hetjax.training import driver
from hetjax.training import task as task_lib

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 32  # of metrics in the progress bar


class Training(task_lib.Task):
    """Rounds of one run until its epochs are done. The line of a round is made while the next one
    computes.

    Args:
        run: whose rounds they are.
        init_state: as of `fit`.
        summary: of the run so far.
        evaluate: the sets, in the process that evaluates.
    """

    unit, number = "round", "round"
    may_grow = resume.MAY_GROW
    reports_at_once = False
    state: RunState
    summary: summary_lib.TrainingSummary

    def __init__(
        self,
        run: run_lib.Run,
        init_state: Any,
        *,
        summary: summary_lib.TrainingSummary,
        evaluate: evaluations.Evaluations,
    ) -> None:
        self.runs, self.recorded = [run], run.recorded
        self.summary, self.evaluate = summary, evaluate
        self._run, self._init_state = run, init_state
        self.fingerprint = functools.partial(run.fingerprint, results.train_of(init_state))
        self._pending: round_report.Report | None = None  # of which no line is made yet
        self._measured: dict[str, Any] = {}  # after its round: eval, consensus
        self._evaluated_at = -1  # rounds that were done then
        self._epoch_ended = False  # by the last round
        self._told_of_weights = False

    # --- Where it begins ---

    def begin(self) -> None:
        self.state = self._run.init(train=self._init_state)
        self._begins_at = self.state.stream.examples_processed

    def go_on(
        self, saved: checkpoint.Saved, lines: Mapping[str, list[workdir.Line]], later: int
    ) -> None:
        self._run.init(train=self._init_state)
        self.state, self.best = self._run.go_on(saved)
        self.summary.go_on(saved.about, lines["metrics"])
        self.summary.examples_recomputed = saved.about["examples_recomputed"] + later
        self._begins_at = self.state.stream.examples_processed

    def examples_of(self, line: workdir.Line) -> int:
        return reported.from_plain(line).counts.examples

    def bar(self) -> dict[str, Any]:
        config = self._run.config
        of_epochs = config.epochs * self.setup.stream.examples_per_epoch
        total = min(of_epochs, config.max_rounds * programs.nominal_examples(config) or of_epochs)
        return {"total": total, "initial": self._begins_at, "unit": "ex", "unit_scale": True}

    # --- How far it is ---

    @property
    def steps_done(self) -> int:
        return self.state.rounds_done

    @property
    def is_complete(self) -> bool:
        return self._run.is_complete(self.state)

    def ended_trace(self) -> str:
        return self._run.config.replay if self._run.is_end_of_trace(self.state) else ""

    def ended_source(self) -> str:
        return self._run.end_of_source(self.state)

    @property
    def how_far(self) -> str:
        epochs = self.state.stream.examples_processed / self.setup.stream.examples_per_epoch
        return f"{self.steps_done} rounds, {epochs:.4g} of {self._run.config.epochs} epochs"

    # --- A round and what comes after it ---

    def step(self, asks: task_lib.Asks, meanwhile: Callable[[], None]) -> allgather_work.Request:
        run, stream = self._run, self.setup.stream
        epoch = stream.epoch(self.state.stream)
        self.state, self._pending = run.round(self.state, request=asks(), meanwhile=meanwhile)
        self._epoch_ended = stream.epoch(self.state.stream) > epoch
        return self._pending.asked

    def measure(self) -> None:
        """At an epoch's end the replicas, too."""
        run, config = self._run, self._run.config
        if not self._epoch_ended:
            if driver.is_due(self.steps_done, config.eval_every_rounds):
                self._evaluate_between_epochs()
            return
        run.settle()
        epochs_done = self.setup.stream.epoch(self.state.stream)
        model, self._measured["consensus"] = run.model(self.state)
        if not epochs_done % config.eval_every or epochs_done >= config.epochs:
            self._evaluate_at(model)

    def measure_at_end(self) -> None:
        if self._pending is not None and not self.ended_trace():
            self._evaluate_between_epochs()

    def _evaluate_between_epochs(self) -> None:
        """Evaluates, but what is evaluated already."""
        if self._evaluated_at != self.steps_done:
            self._run.settle()
            self._evaluate_at(self._run.model(self.state)[0])

    def _evaluate_at(self, model: types.PyTree) -> None:
        """Evaluates the model as it is; the run's clock stands still meanwhile."""
        self._evaluated_at = self.steps_done
        average, given = self._average(), self._run.named(self.state.train).values
        values: dict[str, float] = {}
        if self.evaluate:
            after = f"{self._evaluated_at} rounds"
            values = self.evaluate(model, given, after=after, average=average)
        if not self.setup.methods.reducer.keeps_replicas_equal:
            values |= self._worst()
        if not self.evaluate:
            return
        self._measured["eval"] = values
        if self.summary.evaluated(values):
            self.best = jax.device_get(average if self.summary.judge.of_average else model)
        about = {"summary": self.summary.save(), "evaluated_at": self._evaluated_at}
        self.setup.company.communicator.keep(resume.best_to_arrays(self.best), about)

    def takes_judged(self, lines: Sequence[workdir.Line]) -> None:
        """Also evaluates what its predecessor died over; its line is that of the newest round."""
        due_at, kept = self._evaluated_at, self.setup.company.communicator.kept()
        if kept is None and not self.evaluate:
            return
        self._evaluated_at = -1
        if kept is not None:
            arrays, about = kept
            values = self.summary.take_judged(about["summary"])
            self._evaluated_at = about["evaluated_at"]
            if arrays:
                train = jax.device_get(mesh_lib.own_row(self.state.train))
                self.best = resume.best_from_arrays(arrays, train, self.setup)
            if 0 < self._evaluated_at <= len(lines):  # its leader may not have written it
                lines[self._evaluated_at - 1]["eval"] = reported.plain(values)
            elif self._evaluated_at == self.steps_done:
                self._measured["eval"] = values
        if self.evaluate and due_at > self._evaluated_at and self._pending is not None:
            self._evaluate_between_epochs()

    def _average(self) -> types.PyTree:
        """As `Run.model`: by `ema`; None where there is none. All processes call it."""
        if not self._run.config.ema:
            return None
        found = self._run.average(self.state)
        return found if self.setup.is_stateful else found.params

    def _worst(self) -> dict[str, float]:
        """The metrics of the replica with the highest loss; every process gives its replicas."""
        found = []
        for worker in range(self._run.num_workers):
            train = self.state.train
            rows = judged.of(train.params, train.opt_state)
            if self.setup.is_stateful:
                rows = types.Model(rows, train.model_state)
            replica = state_lib.worker_row((rows, train.values), worker)
            if self.evaluate:
                placed = self.setup.where.put(replica)
                after = f"{self._evaluated_at} rounds, worker {worker}"
                found.append(self.evaluate(*placed, after=after))
        return evaluations.worst(self.evaluate.names, found)

    def line(self) -> task_lib.Told | None:
        self._checked, self._pending = self._pending, None
        measured, self._measured = self._measured, {}
        if self._checked is None:
            return None
        line = self.summary.round_done(self._checked, **measured)
        quotas = _shown(line.quotas, line.workers.present)
        loss = "no loss" if np.isnan(line.loss) else f"loss {line.loss:.3f}"
        text = f"{loss}{_few(line.metrics)} quotas {quotas} "
        return line, [], f"{text}waiting {line.times.waiting_fraction:.0%}", line.counts.examples

    def check(self, report: reported.RoundReport) -> None:
        assert self._checked is not None
        self._checked.check()
        self._checked = None
        if report.update.weight_sum is None or not self.setup.where.leads or self._told_of_weights:
            return
        self._told_of_weights = True
        why = f"the weights of its examples add up to {report.update.weight_sum:g}"
        how = self._run.config.nonfinite
        if report.counts.skipped_examples == report.counts.examples:
            why = f"none of its microbatches is finite, and nonfinite={how!r} leaves them out"
        logger.warning(f"round {report.round}: {why}, so it made no update")

    def told_at_end(self) -> list[str]:
        skipped, done = self.summary.examples_skipped, self.state.stream.examples_processed
        what = "updates" if self._run.config.nonfinite == "skip_update" else "microbatches"
        told = f"{skipped:,} of {done:,} examples were skipped: their {what} were not finite"
        return [told] if skipped else []

    @contextlib.contextmanager
    def shown(self, report: reported.RoundReport) -> Iterator[reported.RoundReport]:
        state: RunState | None = self.state

        def of_train(name: str) -> types.PyTree:
            if state is None:
                return report.params()  # raises
            rows = judged.of(getattr(state.train, name), ())
            if self.setup.methods.reducer.keeps_replicas_equal:
                return jax.device_get(mesh_lib.own_row(rows))
            return state_lib.own_mean(rows)

        def of_average(name: str, of: str) -> types.PyTree:
            if not (average := of_train("average")):
                raise ValueError(f"report.state.ema_{of}: {types.NO_AVERAGE}")
            return state_lib.narrowed(getattr(average, name), getattr(self.setup.begun, of))

        yield dataclasses.replace(
            report,
            params=functools.partial(of_train, "params"),
            state=reported.RoundStates(
                opt_state=functools.partial(of_train, "opt_state"),
                model_state=functools.partial(of_train, "model_state"),
                ema_params=functools.partial(of_average, "params", "params"),
                ema_model_state=functools.partial(of_average, "state", "model_state"),
            ),
        )
        state = None  # its buffers are the next round's

    # --- What it leaves ---

    def saved(self) -> dict[str, Any]:
        return {
            "arrays": resume.to_arrays(self.state, self.best, self.setup),
            "params": self.setup.begun.params,
            "model_state": leaves.form_of(self.setup.begun.model_state),
            "quota": resume.policy_of(self.setup),
            "ema": self.setup.config.ema,
            "source": self.setup.feed.saved(self.state.stream),
            "examples_recomputed": self.summary.examples_recomputed,
        }

    def page(self, summary: dict[str, Any], recorder: workdir.Recorder) -> str:
        return report.render(config=recorder.config, summary=summary, history=recorder.history)

    def params(self) -> types.PyTree:
        return jax.device_get(self._run.model(self.state)[0])

    def result(self, **of_all: Any) -> results.FitResult:
        last, best = (
            found if isinstance(found, types.Model) else types.Model(found, ())
            for found in (of_all.pop("params"), of_all.pop("best_params"))
        )
        average = types.Model(None, ())
        if self._run.config.ema:
            average = jax.device_get(self._run.average(self.state))
        return results.FitResult(
            **of_all,
            **results.of_models(last, best, average),
            state=self.state.train,
            learned=self.state.rounds.policies,
        )


def _shown(quotas: Sequence[int], present: Sequence[bool]) -> str:
    """The quotas of the first eight workers; `-` in a seat that no worker has.

    Example:
        >>> _shown([6, 2, 0, 0], [True, True, True, False])
        '6,2,0,-'
    """
    seats = zip(quotas[:8], present, strict=False)
    shown = [str(quota) if is_here else "-" for quota, is_here in seats]
    return ",".join(shown) + (",…" if len(quotas) > 8 else "")


def _few(metrics: dict[str, float] | None) -> str:
    """As many metrics as the bar's line has room for."""
    text = ""
    for name, value in (metrics or {}).items():
        more = f" {name} {value:.3f}"
        if len(text + more) <= _MOST_CHARACTERS:
            text += more
    return text
