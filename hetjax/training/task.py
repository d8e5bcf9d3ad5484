"""What a driver drives: a `Task` says what a step is, what its line is, and what is saved."""

import contextlib
import logging
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from hetjax import types
from hetjax.checkpoints import checkpoint
from hetjax.comm import allgather_work
from hetjax.records import checkpoint_manager, evaluations, workdir
from hetjax.rounds import engine
from hetjax.rounds import setup as setup_lib

logger = logging.getLogger(__name__)

Asks = Callable[[], allgather_work.Request]
"""What this process asks of all of them, when a round begins."""
Told = tuple[Any, list[tuple[str, workdir.Line]], str, int]
"""Of a step: its report, lines of other files with their names, a text for the bar, and by how much
the bar moves."""


class Task(Protocol):
    """What is driven. Every process of the run calls the methods.

    Attributes:
        unit: what a step is called in messages.
        number: the field of a line that says of which step it is, from 0.
        files: names of the files of lines, by what they hold; `metrics` has a line a step.
        may_grow: fields of the configuration that a finished run may be resumed with more of.
        reports_at_once: whether the line of a step is made when the step is done; else while the
            next one computes.
        runs: whose rounds they are, all of the same processes and workers.
        recorded: the configuration, as `config.json` has it.
        state: what the steps to come depend on.
        summary: of the run so far.
        evaluate: the sets, in the process that evaluates.
        best: the best parameters so far; None: there are none.
        fingerprint: makes digests of what the run depends on beside its configuration.
    """

    fingerprint: Callable[[], dict[str, Any]]
    state: Any
    runs: Sequence[engine.Engine]
    recorded: dict[str, Any]
    summary: Any
    evaluate: evaluations.Evaluations
    best: types.PyTree = None
    unit: ClassVar[str]
    number: ClassVar[str]
    files: ClassVar[Mapping[str, str]] = {"metrics": workdir.METRICS}
    may_grow: ClassVar[tuple[str, ...]]
    reports_at_once: ClassVar[bool]

    @property
    def setup(self) -> setup_lib.Setup:
        """What all runs have in common: processes, workers, checkpoints."""
        return self.runs[0].setup

    def settle(self) -> None:
        """Waits for the last rounds. The run's clock stands still from there to the next one."""
        for run in self.runs:
            run.settle()

    def takes_judged(self, lines: Sequence[workdir.Line]) -> None:
        """Has what the last leader has judged; `lines` are those of the steps."""
        del lines

    def evaluation(self) -> dict[str, str]:
        """Digests of what the best is judged by, by words."""
        return self.evaluate.digests | {"best_by": str(self.summary.judge)}

    def look_at_best(self, about: Mapping[str, Any]) -> None:
        """Forgets the best of a checkpoint that was judged by something else, which is told."""
        there, here = about.get("evaluation", {}), self.evaluation() if self.evaluate.names else {}
        others = [name for name in here if there.get(name, here[name]) != here[name]]
        if others and self.best is not None:
            self.best = None
            self.summary.take_judged({"eval": {}, "best": {}})
            if self.setup.where.leads:
                logger.info(
                    f"the best begins anew: in the checkpoint of {self.unit} {about['rounds']} it "
                    f"is by something else ({', '.join(others)})"
                )

    def compare_sources(self) -> None:
        """Tells of sources that have changed since the run began."""
        for run in self.runs:
            run.setup.feed.compare(-1)

    def begin(self) -> None:
        """The state before the first step; compiles."""

    def go_on(
        self, saved: checkpoint.Saved, lines: Mapping[str, list[workdir.Line]], later: int
    ) -> None:
        """The state of a checkpoint.

        Args:
            saved: the checkpoint.
            lines: of each file, those of the steps that are done.
            later: examples of the lines that came after the checkpoint: they are done again.
        """

    def examples_of(self, line: workdir.Line) -> int:
        """Of a line of `metrics`, as the run may read it again.

        Raises:
            TypeError: it is no such line.
        """
        return 0

    def lines_done(
        self, directory: pathlib.Path | None, saved: checkpoint.Saved | None
    ) -> tuple[dict[str, list[workdir.Line]], int]:
        """The lines of the steps that are done, and the examples of those that are done again."""
        lines: dict[str, list[workdir.Line]] = {name: [] for name in self.files}
        if directory is None or saved is None:
            return lines, 0
        done, later = saved.about["rounds"], 0
        for name, file in self.files.items():
            is_main = name == "metrics"
            check = self.examples_of if is_main else operator.itemgetter(self.number)
            found, wrong = workdir.whole_lines(directory / file, check)
            lines[name] = [line for line in found if line[self.number] < done]
            if not is_main:
                continue
            later = sum(self.examples_of(line) for line in found[len(lines[name]) :])
            if len(lines[name]) < done and self.setup.where.leads:
                logger.warning(
                    f"{str(directory / file)!r} has {len(lines[name])} whole lines of {done} "
                    f"{self.unit}s ({wrong})"
                )
        what = "read the lines of the run"
        return lines, checkpoint_manager.agreed(self.setup, later, board="read", what=what)

    def bar(self) -> dict[str, Any]:
        """Of the progress bar: `total`, what is done (`initial`), `unit`."""

    @property
    def steps_done(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done that the run was asked for."""

    def ended_trace(self) -> str:
        """The trace that is replayed and has no more rounds; '' where there is none."""

    def ended_source(self) -> str:
        """What to tell of an iterable that has no more examples; '' where there is none."""
        return ""

    @property
    def how_far(self) -> str:
        """What is done, for a message: '3 of 5 outer steps'."""

    def step(self, asks: Asks, meanwhile: Callable[[], None]) -> allgather_work.Request:
        """One step; what any process asked of all.

        Args:
            asks: called before each round.
            meanwhile: may be called while the workers compute.
        """

    def measure(self) -> None:
        """Evaluates after a step, where that is due; its line will have it."""

    def measure_at_end(self) -> None:
        """Evaluates after the last step, where that was not done."""

    def line(self) -> Told | None:
        """Of the newest step that has none yet; None: there is no such step."""

    def check(self, report: Any) -> None:
        """Looks at a step whose line is written; raises where it went wrong, or tells."""
        del report

    def shown(self, report: Any) -> contextlib.AbstractContextManager[Any]:
        """The report that callbacks are given: while they run, it has the step's parameters."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds beside what every run has: `arrays`, `params` in the form in
        which `hetjax.load` returns them, and what is said of them."""

    def told_at_end(self) -> list[str]:
        """What process 0 says when the run ends."""
        return []

    def params(self) -> types.PyTree:
        """What the run has reached, on the host; all processes call it."""

    def result(self, **of_all: Any) -> Any:
        """What the run returns; given what a `records.results.SavedRun` has."""

    def page(self, summary: dict[str, Any], recorder: workdir.Recorder) -> str:
        """`report.html`."""
