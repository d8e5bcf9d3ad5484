"""A bilevel problem as the driver's task: a step is a hypergradient and an update of x."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from hetjax import messages, types
from hetjax.bilevel import diagnosis, machine, per_example
from hetjax.bilevel.problem import LOWER, UPPER
from hetjax.bilevel.rounds import outer_report, results, saving
from hetjax.bilevel.rounds import run as run_lib
from hetjax.bilevel.rounds import summary as summary_lib
from hetjax.checkpoints import checkpoint
from hetjax.comm import allgather_work
from hetjax.records import evaluations, workdir
from hetjax.report import bilevel as report_lib
from hetjax.rounds import judged, resume, round_report
from hetjax.training import task as task_lib

FILES = {UPPER: "upper_rounds.jsonl", LOWER: "lower_rounds.jsonl"}
"""Of the rounds of each level, in the workdir."""


class OuterSteps(task_lib.Task):
    """Outer steps of a bilevel run, until they are done.

    Args:
        run: whose steps they are.
        outer_steps: hypergradients.
        eval_every: of them.
        evaluate: the sets, in the process that evaluates.
        has_sets: whether there are any, in whichever process.
        summary: of the run so far.
    """

    unit, number = "outer step", "step"
    files = {"metrics": workdir.METRICS, **FILES}  # noqa: RUF012
    may_grow = ("outer_steps",)
    reports_at_once = True
    state: run_lib.BilevelState
    summary: summary_lib.BilevelSummary

    def __init__(
        self,
        run: run_lib.BilevelRun,
        *,
        outer_steps: int,
        eval_every: int,
        evaluate: evaluations.Evaluations,
        has_sets: bool,
        summary: summary_lib.BilevelSummary,
    ) -> None:
        self.runs = [level.run for level in run.levels.values()]
        self.recorded = saving.recorded(run, outer_steps)
        self.summary, self.evaluate = summary, evaluate
        self._run, self._outer_steps, self._eval_every = run, outer_steps, eval_every
        self._has_sets = has_sets
        self._evaluated_at = -1  # outer steps that were done then
        self._rounds: list[workdir.Line] = []
        self._step: run_lib.OuterStep | None = None  # of which no line is made yet
        self._numbers: dict[str, float] = {}  # of its info
        self._eval: dict[str, float] | None = None  # after it
        self._x: types.PyTree = None  # before it

    def fingerprint(self) -> dict[str, Any]:
        return saving.digests(self._run)

    # --- Where it begins ---

    def begin(self) -> None:
        self.state = self._run.init()

    def go_on(
        self, saved: checkpoint.Saved, lines: Mapping[str, list[workdir.Line]], later: int
    ) -> None:
        self.state = saving.from_arrays(self._run, saved)
        self.best = saving.best_of(self._run, saved)
        self.summary.restore(saved.about)
        self._rounds = sorted(lines[UPPER] + lines[LOWER], key=lambda line: line["start_secs"])

    def bar(self) -> dict[str, Any]:
        return {"total": self._outer_steps, "initial": self.steps_done - 1, "unit": "step"}

    # --- How far it is ---

    @property
    def steps_done(self) -> int:
        return self.state.steps_done

    @property
    def is_complete(self) -> bool:
        return self.steps_done >= self._outer_steps

    def ended_trace(self) -> str:
        for name, at in self.state.levels.items():
            run = self._run.levels[name].run
            if run.is_end_of_trace(at.rounds):
                return run.config.replay
        return ""

    @property
    def how_far(self) -> str:
        return f"{self.steps_done} of {self._outer_steps} outer steps"

    # --- A step and what comes after it ---

    def step(self, asks: task_lib.Asks, meanwhile: Callable[[], None]) -> allgather_work.Request:
        run, x = self._run, self.state.x  # which stays: the update makes another
        self._point = judged.of(x, self.state.opt)
        new, step = run.step(self.state, asks=asks)
        info = run.own_row(step.info)
        _check(info, self.steps_done)
        self.state, self._step, self._x = new, step, x
        self._numbers = outer_report.numbers_of(info)
        asked = allgather_work.Request.NOTHING
        for each in step.asked:
            asked |= each.report.asked
        return asked

    def measure(self) -> None:
        self._eval = None
        if self.steps_done % self._eval_every and not self.is_complete:
            return
        run, self._evaluated_at = self._run, self.steps_done
        run.settle()
        upper_loss = {summary_lib.UPPER_LOSS: self._numbers["upper_loss"]}
        if not (self.summary.is_better(upper_loss) or self._has_sets):
            return
        values = self._judge(run.params(self.state, self._point), self.steps_done - 1, **upper_loss)
        self._eval = values if self.evaluate else None

    def measure_at_end(self) -> None:
        """The last x and y, where a callback ends the run between two evaluations."""
        if self._has_sets and self._evaluated_at != self.steps_done:
            self._run.settle()
            self._judge(self._run.params(self.state), self.steps_done)

    def _judge(self, params: types.PyTree, step: int, **beside: float) -> dict[str, float]:
        """Evaluates x and y, and keeps them where they are the best."""
        values = {}
        if self.evaluate:
            placed = jax.device_put(params, self.setup.where.own_device)
            values = self.evaluate(placed, after=f"{self.steps_done} outer steps")
        if self.summary.evaluated(values, **beside, step=step):
            self.best = params
        return values

    def line(self) -> task_lib.Told | None:
        step, self._step = self._step, None
        if step is None:
            return None
        index = self.steps_done - 1
        rounds = outer_report.of_rounds(step, index, self.summary.clock)
        line = outer_report.of_step(step, index, rounds, numbers=self._numbers, eval=self._eval)
        self.summary.take(line)
        self._rounds += rounds
        gap = "" if line.info.gap is None else f" gap {line.info.gap:.3g}"
        upper = "" if math.isnan(line.upper_loss) else f"F {line.upper_loss:.4f}{gap} "
        text = f"{upper}waiting {line.times.waiting_fraction:.0%}"
        return line, [(of_round["level"], of_round) for of_round in rounds], text, 1

    @contextlib.contextmanager
    def shown(self, report: outer_report.OuterReport) -> Iterator[outer_report.OuterReport]:
        run, x, kept = self._run, self._x, self.state.kept
        yield dataclasses.replace(
            report,
            x=lambda: per_example.plain(run.own_mean(x)),
            y=lambda: run.y0 if kept is None else run.own_mean(kept.y),
        )

    def told_at_end(self) -> list[str]:
        if not self.summary.crossed:
            return []
        return [
            f"{self.summary.crossed} steps of y crossed the barrier and were taken back by half. "
            f"{diagnosis.BARRIER}."
        ]

    # --- What it leaves ---

    def saved(self) -> dict[str, Any]:
        run, state = self._run, self.state
        params = run.params(state)
        return {
            "arrays": saving.to_arrays(run, state, params, self.best),
            "params": params,
            "level_rounds": {name: at.rounds.rounds_done for name, at in state.levels.items()},
            "quota": {name: resume.policy_of(run.levels[name].run.setup) for name in state.levels},
        }

    def page(self, summary: dict[str, Any], recorder: workdir.Recorder) -> str:
        return report_lib.render(
            config=recorder.config, summary=summary, history=recorder.history, rounds=self._rounds
        )

    def params(self) -> types.PyTree:
        return self._run.params(self.state)

    def result(self, **of_all: Any) -> results.BilevelResult:
        return results.BilevelResult(**of_all, state=self.state, rounds=self._rounds)


def _check(info: dict[str, Any], index: int) -> None:
    """Refuses a hypergradient that is not one, by what came with it; all processes alike."""
    if not math.isfinite(info["hypergradient_norm"]):
        raise round_report.NonFiniteError(
            f"outer step {index}: the hypergradient is not finite, though its sums were; the state "
            "before was kept. Lower the lower learning rate, the multiplier or the solver's step"
        )
    found = machine.Info(**{name: info[name] for name in machine.Info._fields if name in info})
    with messages.as_mistake(f"outer step {index}: "):
        diagnosis.check_found(found)
