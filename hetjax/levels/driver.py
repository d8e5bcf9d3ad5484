"""The driver of a whole bilevel run: outer steps until they are done, and what is between them.

It evaluates, keeps the best, calls the user's callbacks, writes the records and keeps checkpoints.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax

from hetjax import driver as driver_lib
from hetjax import interrupt, starting, types
from hetjax.bilevel import diagnosis, machine, per_example
from hetjax.bilevel.problem import LOWER, UPPER
from hetjax.config import recorded
from hetjax.levels import keeping, lines, results, summary
from hetjax.levels import run as run_lib
from hetjax.processes import watch
from hetjax.records import evaluations, keeper, lock, record
from hetjax.report import bilevel as report
from hetjax.rounds import gathering, reporting, resume
from hetjax.rounds.round_report import plain

FILES = {UPPER: "upper_rounds.jsonl", LOWER: "lower_rounds.jsonl"}
"""Of the rounds of each level, in the workdir."""


class Driver:
    """Drives one run to its end.

    Args:
        run: whose steps they are.
        outer_steps: hypergradients.
        eval_every: of them.
        callbacks: called with each line.
        evaluate: the sets, in the process that evaluates.
        has_sets: whether there are any, in whichever process.
        summary: of the run so far.
    """

    def __init__(
        self,
        run: run_lib.BilevelRun,
        *,
        outer_steps: int,
        eval_every: int,
        callbacks: Sequence[Callable[[lines.OuterReport], Any]],
        evaluate: evaluations.Evaluations,
        has_sets: bool,
        summary: summary.Summary,
    ) -> None:
        self._run, self._outer_steps, self._eval_every = run, outer_steps, eval_every
        self._callbacks = driver_lib.Callbacks(callbacks)
        self._evaluate, self._has_sets, self._summary = evaluate, has_sets, summary
        self._evaluated_at = -1  # outer steps that were done then
        self._config = keeping.recorded(run, outer_steps)
        self._history: list[dict[str, Any]] = []
        self._rounds: list[dict[str, Any]] = []
        self._best: types.PyTree = None  # x and y
        self._workdir: pathlib.Path | None = None
        self._files: dict[str, TextIO] = {}
        self._keeper: keeper.Keeper | None = None
        self._asks = self._asked = gathering.Request.NOTHING  # of this process; of all processes

    def open(
        self,
        stack: contextlib.ExitStack,
        workdir: pathlib.Path | None,
        *,
        resume: bool | str,
        progress: bool,
    ) -> None:
        """Finds where the run begins, and opens its files."""
        run, digests = self._run, {}
        if workdir is not None and run.parts.leads:
            stack.enter_context(lock.held(record.made_directory(workdir)))
            digests = keeping.digests(run)
        saved, grown = keeper.find_saved(
            workdir,
            self._config,
            parts=run.parts,
            fingerprint=digests,
            resume=resume,
            may_grow=("outer_steps",),
            unit="outer step",
        )
        if saved is None:
            self._state = run.init()
        else:
            self._state, self._best = keeping.from_arrays(run, saved), keeping.best_of(saved)
            self._summary.restore(saved.about)
            if keeper.is_restarted() and saved.about["finished"] and not grown:
                self._summary.stopped_by = saved.about.get("stopped_by")
        if workdir is not None:
            self._keeper = keeper.Keeper(workdir, run.parts, fingerprint=digests)
            stack.enter_context(self._keeper)
            if run.parts.leads:
                self._workdir = workdir
                self._begin_files(workdir, saved.about["rounds"] if saved else 0)
                stack.callback(self._close)
        self._bar = self._make_bar() if progress and run.parts.leads else None
        if self._bar is not None:
            stack.callback(self._bar.close)

    def _begin_files(self, workdir: pathlib.Path, steps_done: int) -> None:
        names = {"metrics": "metrics.jsonl", **FILES}
        kept: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        if steps_done:
            kept = {name: record.whole_lines(workdir / file) for name, file in names.items()}
        kept = {
            name: [x for x in of_file if x["step"] < steps_done] for name, of_file in kept.items()
        }
        self._history = kept["metrics"]
        self._rounds = sorted(kept[UPPER] + kept[LOWER], key=lambda line: line["start_secs"])
        try:
            record.write_whole(workdir / "config.json", json.dumps(self._config, indent=2) + "\n")
            for name, file in names.items():
                text = "".join(json.dumps(line) + "\n" for line in kept[name])
                record.write_whole(workdir / file, text)
                self._files[name] = (workdir / file).open("a", buffering=1)
            for name in ("summary.json", "report.html"):
                (workdir / name).unlink(missing_ok=True)
        except OSError as error:
            raise recorded.unusable(workdir, error) from error

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _make_bar(self) -> Any:
        return starting.bar_class()(
            total=self._outer_steps,
            initial=self._state.steps_done,
            unit="step",
            mininterval=0.3,
            dynamic_ncols=True,
        )

    def drive(self) -> results.BilevelResult:
        """All outer steps from there on; writes the files however they end."""
        with interrupt.deferred(unit="outer step") as interrupted:
            try:
                while not (self._is_complete or self._summary.stopped_by):
                    self._ask(interrupted)
                    if self._asked.ends or self._is_end_of_trace():
                        break
                    self._step(functools.partial(self._ask, interrupted))
                if not self._by_signal:
                    self._evaluate_at_end()
                for level in self._run.levels.values():  # what the last callback has changed, too
                    level.run.parts.feed.compare(-1)
                self._say_who_stopped()
                self._save()
            except reporting.NonFiniteError as error:
                error.result = self._result(interrupted=True)
                raise
            except Exception:
                with contextlib.suppress(ValueError):
                    self._finish(interrupted=True)
                raise
            return self._result(interrupted=not self._is_finished)

    def _ask(self, interrupted: Callable[[], Any]) -> gathering.Request:
        """What this process asks of all; alone, all have heard it at once."""
        self._asks |= driver_lib.ASK_OF_SIGNAL[interrupted()]
        if self._run.parts.meeting.alone:
            self._asked |= self._asks
        return self._asks

    def _is_end_of_trace(self) -> bool:
        """Whether a trace that is replayed has no more rounds; says so."""
        at_level = {UPPER: self._state.upper, LOWER: self._state.lower}
        for name, at in at_level.items():
            run = self._run.levels[name].run
            if run.is_end_of_trace(at.run):
                if self._run.parts.leads:
                    print(
                        f"hetjax: the trace {run.config.replay!r} ends after "
                        f"{self._state.steps_done} outer steps; so does this run.",
                        file=sys.stderr,
                    )
                return True
        return False

    @property
    def _by_signal(self) -> str:
        return driver_lib.signal_of(self._asked)

    @watch.taking_part
    def _step(self, asks: Callable[[], gathering.Request]) -> None:
        run, before = self._run, self._state
        index = before.steps_done
        x = before.x  # stays: the update makes another
        new, step = run.step(before, asks=asks)
        for asked in step.asked:
            self._asked |= asked.report.asked
        info = run.own_row(step.info)
        _check(info, index)
        numbers = lines.numbers_of(info)
        is_recorded = not new.steps_done % self._eval_every or new.steps_done == self._outer_steps
        rounds = lines.of_rounds(step, index, self._summary.clock)
        self._state = new
        values: dict[str, float] | None = None
        if is_recorded:
            run.settle()
            values = self._evaluated(numbers["upper_loss"], index, x)
        line = lines.of_step(step, index, rounds, numbers=numbers, eval=values)
        self._summary.step_done(line)
        self._write(line, rounds)
        if self._callbacks:
            run.parts.beacons.at("reporting", index)
            self._call_back(line, x)
        run.parts.beacons.at("waiting", index)
        if self._is_due():
            self._save()

    def _evaluated(self, upper_loss: float, step: int, x: types.PyTree) -> dict[str, float] | None:
        """Evaluates, and keeps the best; all processes call it."""
        run = self._run
        self._evaluated_at = self._state.steps_done
        is_best = self._summary.is_best(upper_loss, step)
        if not (is_best or self._has_sets):
            return None
        params = run.params(self._state, x)
        if is_best:
            self._best = params
        if not self._evaluate:
            return None
        values = self._evaluated_params(params)
        self._summary.evaluated(values, is_best=is_best)
        return values

    def _evaluate_at_end(self) -> None:
        """Evaluates the last x and y, where a callback ends the run between two evaluations."""
        if self._has_sets and self._evaluated_at != self._state.steps_done:
            self._run.settle()
            params = self._run.params(self._state)
            if self._evaluate:
                self._summary.evaluated(self._evaluated_params(params), is_best=False)

    def _evaluated_params(self, params: types.PyTree) -> dict[str, float]:
        placed = jax.device_put(params, self._run.parts.own_device)
        return self._evaluate(placed, after=f"{self._evaluated_at} outer steps")

    def _write(self, line: lines.OuterReport, rounds: list[lines.RoundLine]) -> None:
        fields = line.to_plain()
        self._history.append(fields)
        self._rounds += rounds
        if self._workdir is not None:
            try:
                self._files["metrics"].write(json.dumps(fields, allow_nan=False) + "\n")
                for of_round in rounds:
                    text = json.dumps(of_round, allow_nan=False) + "\n"
                    self._files[of_round["level"]].write(text)
            except OSError as error:
                raise recorded.unusable(self._workdir, error) from error
        if self._bar is not None:
            gap = "" if line.gap is None else f" gap {line.gap:.3g}"
            self._bar.set_postfix_str(
                f"F {line.upper_loss:.4f}{gap} waiting {line.waiting_fraction:.0%}", refresh=False
            )
            self._bar.update()

    def _call_back(self, line: lines.OuterReport, x: types.PyTree) -> None:
        run, state = self._run, self._state
        asked = dataclasses.replace(
            line,
            x=lambda: per_example.plain(run.own_mean(x)),
            y=lambda: run.y0 if state.kept is None else run.own_mean(state.kept.y),
        )
        if self._callbacks(asked):
            self._asks |= gathering.Request.END

    def _is_due(self) -> bool:
        every_rounds = self._run.parts.config.checkpoint.every_rounds
        if self._run.parts.meeting.alone:
            self._asked |= self._asks
        if gathering.Request.SAVE in self._asked:
            self._asks &= ~gathering.Request.SAVE
            self._asked &= ~gathering.Request.SAVE
            return True
        if self._keeper is not None and self._keeper.is_due():
            self._asks |= gathering.Request.SAVE
        return driver_lib.is_due(self._state.steps_done, every_rounds)

    def _save(self) -> None:
        if self._keeper is None:
            return
        run, state = self._run, self._state
        run.settle()
        run.parts.beacons.at("checkpointing", state.steps_done)
        params = run.params(state)
        self._keeper.save(
            keeping.to_arrays(run, state, params, self._best),
            done=state.steps_done,
            params=params,
            best_params=self._best,
            level_rounds={
                UPPER: state.upper.run.rounds_done,
                LOWER: state.lower.run.rounds_done,
            },
            quota={own.name: resume.policy_of(own.run.parts) for own in (run.upper, run.lower)},
            finished=self._is_finished,
            summary=self._summary.save(),
            stopped_by=self._stopped_by,
        )

    @property
    def _is_complete(self) -> bool:
        return self._state.steps_done >= self._outer_steps

    @property
    def _is_finished(self) -> bool:
        """Whether the run is at its end, which a callback may have said; no signal says it."""
        ended = gathering.Request.END in self._asked or bool(self._summary.stopped_by)
        return self._is_complete or (ended and not self._by_signal)

    @property
    def _stopped_by(self) -> str | None:
        """Who ended the run before its last step."""
        if self._by_signal:
            return self._by_signal
        if gathering.Request.END in self._asked:
            return f"callback {self._callbacks.stopper}".strip()
        return self._summary.stopped_by

    def _say_who_stopped(self) -> None:
        self._summary.stopped_by = self._stopped_by
        if self._run.parts.leads and self._summary.crossed:
            print(
                f"hetjax: {self._summary.crossed} steps of y crossed the barrier and were taken "
                f"back by half. {diagnosis.BARRIER}.",
                file=sys.stderr,
            )
        if self._run.parts.leads and self._asked.ends:
            goes_on = self._by_signal and self._keeper is not None
            more = "; the same call goes on from there" if goes_on else ""
            print(
                f"hetjax: {self._summary.stopped_by} ended the run after "
                f"{self._state.steps_done} of {self._outer_steps} outer steps{more}.",
                file=sys.stderr,
            )

    def _finish(self, *, interrupted: bool) -> dict[str, Any]:
        """Writes `summary.json` and `report.html`; the summary as JSON holds it."""
        written = plain(self._summary.as_dict(self._state, interrupted=interrupted))
        if self._workdir is not None:
            try:
                text = json.dumps(written, indent=2) + "\n"
                record.write_whole(self._workdir / "summary.json", text)
                report.write(
                    self._workdir / "report.html",
                    config=self._config,
                    summary=written,
                    history=self._history,
                    rounds=self._rounds,
                )
            except OSError as error:
                raise recorded.unusable(self._workdir, error) from error
        return written

    def _result(self, *, interrupted: bool) -> results.BilevelResult:
        run = self._run
        params = run.params(self._state)
        return results.BilevelResult(
            params=params,
            best_params=params if self._best is None else self._best,
            summary=self._finish(interrupted=interrupted),
            history=self._history,
            config=self._config,
            workdir=self._workdir,
            state=self._state,
            rounds=self._rounds,
        )


def _check(info: dict[str, Any], index: int) -> None:
    """Refuses a hypergradient that is not one, by what came with it; all processes alike."""
    if not math.isfinite(info["hypergradient_norm"]):
        raise reporting.NonFiniteError(
            f"outer step {index}: the hypergradient is not finite, though every sum that it is "
            "made of was. The state before this step was kept. Lower the learning rate of the "
            "lower steps, or the multiplier or the size of the linear system's steps"
        )
    found = machine.Info(**{name: info[name] for name in machine.Info._fields if name in info})
    try:
        diagnosis.check_solved(found)
        diagnosis.check_barrier(found)
    except ValueError as error:
        raise ValueError(f"outer step {index}: {error}") from error
