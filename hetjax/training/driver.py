"""The driver of a whole run: step after step until it is done, and what is done between them.

A `Task` says what a step is: a round of training, or an outer step of a bilevel problem. The driver
holds the workdir, finds where the run begins, calls the user's callbacks, listens to signals, keeps
lines and checkpoints, and writes the files however the run ends.
"""

import contextlib
import datetime
import logging
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.checkpoints import checkpoint, leaves
from hetjax.comm import allgather_work, join, runtime
from hetjax.inputs import arguments
from hetjax.liveness import interrupts
from hetjax.records import checkpoint_manager, lock, workdir
from hetjax.rounds import round_report
from hetjax.training import callbacks as callbacks_lib
from hetjax.training import task as task_lib
from hetjax.writers import background, hearing
from hetjax.writers import records as writer_records

logger = logging.getLogger(__name__)

_ASKS = {number: allgather_work.Request[f"END_BY_{number.name}"] for number in interrupts.ENDS}
_AGAIN_SECS = 5.0  # of lines that writers of a new leader get: those of the last may lack them


class Driver:
    """Drives one task to its end, from where the run in its workdir goes on.

    Args:
        stack: closes the files, after the run.
        task: that has no state yet.
        directory: the workdir; None: nothing is kept.
        resume, callbacks: as of `fit`.
        writers: checked; only process 0 has them.
        progress: show a bar.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        task: task_lib.Task,
        *,
        directory: pathlib.Path | None,
        resume: bool | str,
        progress: bool,
        callbacks: Sequence[Callable[[Any], Any]],
        writers: Sequence[writer_records.Writer] = (),
    ) -> None:
        self._task, self._directory, self._stack = task, directory, stack
        self._shows = progress
        self._asks = self._asked = allgather_work.Request.NOTHING  # of this process; of all
        self._signal: Callable[[], signal.Signals | None] = lambda: None
        self._told_of_signal: list[str] = []
        place = pathlib.Path() if directory is None else directory
        self._communicator = task.setup.company.communicator
        self._holder = lock.Holder(stack, place, self._communicator)
        is_guest = self._communicator.joins  # that leads takes over first
        saved, lines, later = self._start(resume)
        self._open(lines, leads=task.setup.where.leads and not is_guest)
        if saved is None:
            task.begin()
        else:
            task.go_on(saved, lines, later)
            task.look_at_best(saved.about)
            task.summary.stopped_by = saved.about.get("stopped_by")
        told_of = self._told_of(task.steps_done)
        self._callbacks = callbacks_lib.Callbacks([*callbacks, *hearing.callbacks(told_of)])
        self._given_writers = writers
        self._writers = background.Background(writers if self._leads else (), told_of)
        stack.callback(lambda: self._writers.close("interrupted"))  # where nothing has closed them

    def _told_of(self, first_step: int) -> writer_records.RunInfo:
        """What writers know of the run, of which they get the lines from a step on."""
        sets = tuple(self._task.evaluate.names)
        of_run = self._task.recorded, self._directory, first_step, sets, self._holder.lead
        return writer_records.RunInfo(*of_run)

    def _start(
        self, resume: bool | str
    ) -> tuple[checkpoint.Saved | None, dict[str, list[workdir.Line]], int]:
        """Where the run begins, the lines of the steps that are done, and as of `lines_done`."""
        task, directory, setup = self._task, self._directory, self._task.setup
        self._fingerprint: dict[str, Any] = {}
        if self._communicator.joins:
            task.begin()  # compiles, before another process waits for this one
            setup.company.heartbeats.at("waiting")
            self._look_for_workdir()
            arrays, about = self._communicator.receive_state()
            lines = about.pop("lines")
            return checkpoint.Saved(about["rounds"], arrays, about), lines, 0
        saved = None
        if directory is not None:
            if setup.where.leads:
                workdir.made_directory(directory)
                self._holder.hold()
                self._fingerprint = task.fingerprint()
            else:
                self._look_for_workdir()
            saved = checkpoint_manager.saved_in(
                directory, task, resume, fingerprint=self._fingerprint
            )
            if setup.where.leads:
                self._holder.begin(-1 if saved is None else saved.step)
                self._look_for_workdir()
        return saved, *task.lines_done(directory, saved)

    def _look_for_workdir(self) -> None:
        """Where processes are on several machines, or come and go: sees that all have one."""
        is_one = len(join.machines()) <= 1 and not self._communicator.run_id
        if self._directory is not None and not is_one:
            own, leads = runtime.current().process_id, self._holder.lead is not None
            workdir.check_shared(self._directory, own, leads=leads)

    def _open(self, lines: Mapping[str, list[workdir.Line]], *, leads: bool) -> None:
        """Begins to keep the run: in the process that leads, in its workdir."""
        task, setup = self._task, self._task.setup
        self._leads = leads
        lead, manager = self._holder.lead, checkpoint_manager.CheckpointManager
        self._checkpoints = manager(self._directory, setup, lead)
        self._stack.callback(self._checkpoints.close)
        self._recorder = workdir.Recorder(
            self._directory if self._leads else None,
            task.recorded,
            files=task.files,
            lines=lines,
            bar=self._bar if self._shows and self._leads else None,
            lead=lead,
        )
        self._stack.callback(self._recorder.close)

    def _take_over(self) -> None:
        """Leads from now on, in the place of a process that is gone; has each step's line once."""
        task, lines, directory = self._task, self._recorder.lines, self._directory
        task.setup.company.heartbeats.at("checkpointing", task.steps_done)
        logger.info(
            f"worker {task.setup.where.own[0]} leads from {task.unit} {task.steps_done} on; its "
            "callbacks begin now"
        )
        if directory is not None:
            self._holder.take_over(task.steps_done)
            self._fingerprint = task.fingerprint()
            for name, file in task.files.items():
                own, (written, _) = lines[name], workdir.whole_lines(directory / file)
                lines[name] = [*written[: len(own)], *own[len(written) :]]
        task.takes_judged(lines["metrics"])
        task.summary.leads_from(lines["metrics"])
        self._recorder.close()
        self._open(lines, leads=True)
        now = task.summary.clock
        again = [line for line in lines["metrics"] if now - line["start_secs"] < _AGAIN_SECS]
        told_of = self._told_of(again[0][task.number] if again else task.steps_done)
        self._writers = background.Background(self._given_writers, told_of)
        for line in again:
            self._writers.put(line)

    def _hand_on(self) -> None:
        """Hands the run as it is to the newest members."""
        self._task.settle()
        self._report()
        self._task.setup.company.heartbeats.at("checkpointing", self._task.steps_done)
        arrays, about = self._saved()
        del about["saved"]  # it is no checkpoint
        self._communicator.send_state(arrays, about | {"lines": self._recorder.lines})

    def _bar(self) -> Any:
        """The bar, where the line of the start was."""
        return self._task.summary.begins.bar(mininterval=0.3, **self._task.bar())

    def drive(self) -> Any:
        """All steps from there on; writes the files however they end. Returns `task.result`."""
        task = self._task
        with interrupts.deferred(unit=task.unit) as self._signal:
            try:
                while not (task.is_complete or task.summary.stopped_by):
                    if task.setup.where.leads and not self._leads:
                        self._take_over()
                    self._ask()
                    if self._asked.ends or self._runs_out():
                        break
                    with runtime.current().detector.taking_part():
                        self._asked |= task.step(self._ask, self._report)
                        self._after_step()
                self._communicator.start_barrier(task.state)  # where none was left
                if not self._leads:
                    if self._communicator.outlives_leader():
                        self._take_over()
                    else:
                        task.takes_judged(self._recorder.lines["metrics"])
                if not self._by_signal:
                    task.measure_at_end()
                with runtime.current().detector.taking_part():
                    self._report()
                self._end()
                self._save()
            except round_report.NonFiniteError as error:
                error.result = self._result(interrupted=True, status="failed")
                raise
            except Exception:
                with contextlib.suppress(ValueError):  # the first error is the cause
                    self._write_summary(interrupted=True, status="failed")
                self._writers.close("failed")
                raise
            status = "finished" if self._is_finished else "interrupted"
            result = self._result(interrupted=not self._is_finished, status=status)
            self._checkpoints.close()
            # Not after an error: the process that failed is to be the first that is gone.
            self._communicator.close()
        return result

    def unless_stopped(self, result: Any, *, raises: bool) -> Any:
        """The result. After a signal the program's own handler of it is called first; where there
        is none, what Python raises for it is raised, and holds the result.

        Also where the run came to its end all the same: after Ctrl-C no other is to begin.
        Call it when the run is closed.

        Raises:
            KeyboardInterrupt, SystemExit: after SIGINT, another signal; unless it is not to.
        """
        number = self._by_signal or self._signal()
        if number is None or interrupts.hand_on(number) or not raises:
            return result
        error: Any = SystemExit(128 + number)
        if number == signal.SIGINT:
            error = KeyboardInterrupt(*self._told_of_signal)
        error.result = result
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None and self._task.setup.where.leads:
            logger.info("the result so far: import sys; result = sys.last_value.result")
        raise error

    def _ask(self) -> allgather_work.Request:
        """What this process asks of all; alone, all have heard it at once."""
        if (number := self._signal()) is not None and not self._communicator.leaves_by(number):
            self._asks |= _ASKS[number]
        if self._communicator.alone:
            self._asked |= self._asks
        return self._asks

    def _runs_out(self) -> bool:
        """Whether the trace that is replayed has no more rounds, or an iterable has ended before
        the run; process 0 says so."""
        task, told = self._task, ""
        if trace := task.ended_trace():
            told = (
                f"the trace {trace!r} ends after {task.steps_done} {task.unit}s; so does this run"
            )
        elif source := task.ended_source():
            told = f"{source}. The run ends here, after {task.how_far}; nothing of it is lost."
        if told and task.setup.where.leads:
            logger.info(told)
        return bool(told)

    def _after_step(self) -> None:
        """What is due after a step."""
        task, request = self._task, allgather_work.Request
        every = task.setup.config.checkpoint.every_rounds
        task.measure()
        if self._communicator.sends_state():
            self._hand_on()
        if task.reports_at_once:
            self._report()
        self._ask()
        if request.SAVE in self._asked or is_due(task.steps_done, every):
            self._save()
        self._asked &= ~request.SAVE
        self._asks &= ~request.SAVE
        if self._checkpoints.is_due():
            self._asks |= request.SAVE

    def _report(self) -> None:
        """Records the newest step, whose numbers have arrived by now, and calls the callbacks."""
        task, heartbeats = self._task, self._task.setup.company.heartbeats
        if (found := task.line()) is None:
            return
        report, others, text, amount = found
        number = getattr(report, task.number)
        line = report.to_plain()
        self._recorder.add([("metrics", line), *others], text, amount)
        self._writers.put(line)
        task.check(report)
        if self._callbacks and (self._leads or task.setup.where.leading is None):
            heartbeats.at("reporting", number)
            with task.shown(report) as shown:
                if self._callbacks(shown):
                    self._asks |= allgather_work.Request.END
        heartbeats.at("waiting", number)

    def _save(self) -> None:
        """Keeps the run as it is; the run's clock stands still meanwhile."""
        if not self._checkpoints.keeps:
            return
        task = self._task
        task.settle()
        with runtime.current().detector.taking_part():
            self._report()
        self._ask()
        task.setup.company.heartbeats.at("checkpointing", task.steps_done)
        self._checkpoints.save(*self._saved())
        task.setup.company.heartbeats.at("waiting", task.steps_done)

    def _saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All that the run goes on from, and what is said of it."""
        task, setup, saved = self._task, self._task.setup, self._task.saved()
        arrays, params = saved.pop("arrays"), saved.pop("params")
        return arrays, saved | {
            "rounds": task.steps_done,
            "written_by": self._holder.lead and self._holder.lead.about,
            "finished": self._is_finished,
            "stopped_by": self._stopped_by,
            "num_workers": len(setup.where.devices),
            "has_best": task.best is not None,
            "form": leaves.form_of(params),
            "evaluation": task.evaluation(),
            "fingerprint": self._fingerprint,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "solutions": setup.company.solved.save(),
            "summary": task.summary.save(),
            "versions": arguments.versions(),
        }

    @property
    def _by_signal(self) -> signal.Signals | None:
        """The signal that ended the run."""
        return next((number for number, ask in _ASKS.items() if ask in self._asked), None)

    @property
    def _is_finished(self) -> bool:
        """Whether the run is at its end, which a callback may have said; no signal says it."""
        task = self._task
        ended = allgather_work.Request.END in self._asked or bool(task.summary.stopped_by)
        return task.is_complete or (ended and not self._by_signal)

    @property
    def _stopped_by(self) -> str | None:
        """Who ended the run before its last step."""
        if not self._task.is_complete:
            if self._by_signal:
                return self._by_signal.name
            if allgather_work.Request.END in self._asked:
                return f"callback {self._callbacks.stopper}".strip()
        return self._task.summary.stopped_by

    def _end(self) -> None:
        """Looks at what the last callback has changed, and says who ended the run."""
        task = self._task
        task.compare_sources()
        self._ask()
        task.summary.stopped_by = self._stopped_by
        if not task.setup.where.leads:
            return
        told = task.told_at_end()
        if self._asked.ends and not task.is_complete:
            goes_on = self._by_signal and self._checkpoints.keeps
            more = f"; the same call goes on from there ({self._recorder.workdir})"
            text = f"{task.summary.stopped_by} ended the run after {task.how_far}"
            told.append(f"{text}{more if goes_on else ''}.")
            self._told_of_signal = told[-1:] if goes_on else []
        for text in told:
            logger.info(text)

    def _write_summary(self, *, interrupted: bool, status: str) -> dict[str, Any]:
        """Writes what the run leaves, and ends its writers."""
        task, recorder = self._task, self._recorder
        task.setup.company.heartbeats.at("checkpointing")
        found = task.summary.as_dict(task.state, interrupted=interrupted)
        summary = recorder.finish(found, task.page)
        self._writers.close(
            status, summary=summary, report=lambda: recorder.page or task.page(summary, recorder)
        )
        return summary

    def _result(self, *, interrupted: bool, status: str) -> Any:
        task, recorder = self._task, self._recorder
        params = task.params()
        return task.result(
            params=params,
            best_params=params if task.best is None else task.best,
            summary=self._write_summary(interrupted=interrupted, status=status),
            history=recorder.history,
            config=recorder.config,
            workdir=self._directory,
        )


def is_due(steps_done: int, every: int) -> bool:
    """Whether something that is done every so many steps is done now."""
    return every > 0 and steps_done % every == 0
