"""Runs a gang of local processes until they finish, and restarts it when one dies or hangs.

What the exit code of a worker means: 0 finished; 2 bad input, which no restart mends; 128 + n ended
by the signal n of `interrupts.ENDS`, saved; anything else a fault. After a fault the whole gang is
started again, since no process can join the others in the middle of a run. The workers go on from
their last checkpoint, of which nothing here knows. A worker that raises tells so (`exit_reports`)
before anything else of it ends. So the user need not guess which was at fault.
"""

import contextlib
import dataclasses
import itertools
import logging
import pathlib
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hetjax.comm import join
from hetjax.launcher import cpu_shares, environment, faults, gang, stacks
from hetjax.liveness import exit_reports, heartbeats, interrupts

logger = logging.getLogger(__name__)

BAD_INPUT = 2
_STOPPED = frozenset(128 + number for number in interrupts.ENDS)

_AFTER_DEATH_SECS = 2.0  # grace for workers that wait for a dead one and have nothing to save
_HEAR_SECS = 0.2  # between two looks at what workers told of their ends
_SAVING_GRACES = 3  # times grace_secs: to end the round and save when stopped from outside


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run and how patiently. `hetjax.launch` says what each is.

    Args:
        command: the program and its arguments, the same for each worker.
        num_workers: how many processes.
        cpus: each worker's share, in cores; (): no limits.
        max_restarts: how often the gang may be started again.
        heartbeat_secs: a hung worker is noticed within two of these.
        start_secs: how long a worker may take to start.
        grace_secs: between SIGTERM and SIGKILL; more while one saves.
        host: address of the coordinator.
        port: of the coordinator in the first attempt; 0: a free one.
        is_apart: workers come and go.
        max_workers: seats of a run apart; 0: as many as it begins with.
        late_secs: how long its workers wait for one that makes no progress, at least; 0: as the
            environment says (`membership.patience`).
        settle_secs: when one worker dies the others follow. The cause is looked for among all
            that end within this time.
    """

    command: tuple[str, ...]
    num_workers: int
    cpus: tuple[float, ...] = ()
    max_restarts: int = 3
    heartbeat_secs: float = 30.0
    start_secs: float = 300.0
    grace_secs: float = 10.0
    host: str = "127.0.0.1"
    port: int = 0
    is_apart: bool = False
    max_workers: int = 0
    late_secs: float = 0.0
    settle_secs: float = 1.0


class Verdict(NamedTuple):
    """How an attempt ended."""

    code: int
    cause: str = ""
    restart: bool = False


def supervise(options: Options, make: "type[Supervisor] | None" = None) -> int:
    """Runs the command once for each worker until all have finished.

    Call it from the main thread: it handles the signals of `interrupts.ENDS` meanwhile.

    Args:
        options: what to run.
        make: the supervisor, of its fields.

    Returns:
        The exit code of the launcher: 0 all finished, 1 the restarts are spent or workers did
        not end when told to, 2 bad input, 128 + n ended by a signal, such as 130 by Ctrl-C.

    Raises:
        OSError: the processes cannot be started.
    """
    log, events = gang.Log(), gang.Events()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.handled_by(lambda number, _: events.put(number)))
        guardian = gang.Guardian()
        stack.callback(guardian.close)
        shares = cpu_shares.hold(options.cpus)
        stack.callback(shares.close)
        for group in shares.groups:
            guardian.add("control_group", group)
        cache = stack.enter_context(directory("hetjax-cache-", guardian))
        logger.info(f"{options.num_workers} workers; {shares.description}")
        return (make or Supervisor)(options, shares, guardian, log, events, cache).run()


@contextlib.contextmanager
def directory(
    prefix: str, guardian: gang.Guardian, where: str | None = None
) -> Iterator[pathlib.Path]:
    """A new directory, removed at the end; the guardian removes it if this process cannot."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as name:
        guardian.add("directory", name)
        yield pathlib.Path(name)
    guardian.drop("directory", name)


@dataclasses.dataclass
class Supervisor:
    """Runs attempts: takes what happens in each, in order, and decides."""

    _options: Options
    _shares: cpu_shares.NoShares
    _guardian: gang.Guardian
    _log: gang.Log
    _events: gang.Events
    _cache: pathlib.Path
    _stop_code: int = 0  # not 0: the user or the system asked for the end of the whole run
    _restarts: int = 0  # so far
    _busy_secs: float = 0.0  # that the others wait for work of a worker's own

    def run(self) -> int:
        """Attempts until one is the last; the exit code."""
        most = self._options.max_restarts
        for attempt in itertools.count():
            verdict = self._attempt(attempt)
            if not verdict.restart or self._stop_code:
                if verdict.cause:
                    logger.error(verdict.cause)
                return self._stop_code if verdict.restart else verdict.code
            if self._restarts >= most:
                break
            self._restarts += 1
            more = f"restart {self._restarts} of {most} from the last checkpoint, if there is one"
            logger.warning(f"{verdict.cause}; {more}")
        logger.error(
            f"{verdict.cause}; no restart is left of --max_restarts={most}; "
            "the same command goes on from the last checkpoint, if there is one"
        )
        return verdict.code

    def _environments(self, common: Mapping[str, str]) -> list[dict[str, str]]:
        """The variables of each process that begins."""
        own = range(self._options.num_workers)
        return [{**common, "HETJAX_PROCESS_ID": str(index)} for index in own]

    def _attempt(self, number: int) -> Verdict:
        options = self._options
        port = join.find_port(options.host, options.port if number == 0 else 0)
        host = f"[{options.host}]" if ":" in options.host else options.host
        with contextlib.ExitStack() as stack:
            self._directory = stack.enter_context(directory("hetjax-heartbeats-", self._guardian))
            common = {
                **environment.compilation_cache(self._cache),
                **environment.allocator(),
                "HETJAX_NUM_PROCESSES": str(options.num_workers),
                "HETJAX_COORDINATOR": f"{host}:{port}",
                "HETJAX_ATTEMPT": str(number),
                "HETJAX_BEACONS": str(self._directory),
                "HETJAX_HEARTBEAT_SECS": str(options.heartbeat_secs),
                "PYTHONUNBUFFERED": "1",
            }
            self._verdict: Verdict | None = None
            self._faults: list[gang.WorkerExit] = []
            self._told: exit_reports.ExitReport | None = None
            self._deadline: tuple[float, Callable[[], None]] | None = None
            self._workers = gang.Gang(
                options.command, self._shares, self._log, self._events, self._guardian
            )
            with contextlib.closing(self._workers):
                for index, variables in enumerate(self._environments(common)):
                    self._workers.start(index, variables)
                self._next_look = time.monotonic()
                return self._follow()

    def _follow(self) -> Verdict:
        """Handles what happens until all workers have ended."""
        while self._workers.running:
            wake = min(self._next_look, time.monotonic() + _HEAR_SECS)
            if self._deadline is not None:
                wake = min(wake, self._deadline[0])
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=max(0.0, wake - time.monotonic())))
            self._hear()
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline[0]:
                action, self._deadline = self._deadline[1], None
                action()
            elif now >= self._next_look:
                self._look(now)
        while not self._events.empty():  # a Ctrl-C that came with the last of them
            self._take(self._events.get())
        if self._verdict is None and self._faults:
            self._conclude()
        return self._verdict or Verdict(0)

    def _take(self, event: gang.WorkerExit | signal.Signals) -> None:
        if isinstance(event, signal.Signals):
            self._signalled(event)
            return
        self._workers.ended(event.worker)
        code = event.returncode
        if self._stop_code and 128 - code in _STOPPED:
            code = self._stop_code  # a program without a handler and with nothing to save
        if code == 0:
            return
        if self._verdict is not None:
            if self._verdict.code in _STOPPED and code != self._verdict.code:
                logger.warning(f"{end_of(event)} while the run was stopping")
        elif code == BAD_INPUT:
            told = exit_reports.read(self._directory)
            worker = event.worker if told is None else told.process
            cause = f"worker {worker} refused its input (exit code 2); nothing is restarted"
            self._verdict = Verdict(BAD_INPUT, cause)
            self._terminate(self._options.grace_secs)
        elif code in _STOPPED and not self._faults:
            self._verdict = Verdict(code)
            if self._deadline is None:
                self._set_deadline(_SAVING_GRACES * self._options.grace_secs, self._too_late)
        else:
            self._faults.append(event)
            if len(self._faults) == 1:
                self._set_deadline(self._options.settle_secs, self._conclude)

    def _signalled(self, signum: signal.Signals) -> None:
        if signum == signal.SIGINT and self._stop_code:
            self._verdict = Verdict(self._stop_code, "stopped at once")
            self._workers.kill()
            return
        if self._stop_code == 128 + signum:
            return
        self._stop_code = 128 + signum
        if self._verdict is not None or self._faults:
            return  # they are being ended already
        self._workers.send(signum)
        if signum == signal.SIGINT:
            logger.info("Ctrl-C: ending after this round; once more to stop at once")
        else:
            logger.info(f"{signum.name}: the workers end this round and save")
            self._set_deadline(_SAVING_GRACES * self._options.grace_secs, self._too_late)

    def _too_late(self) -> None:
        """The grace is over and some still run: all were told to end, or the others ended."""
        late = ", ".join(map(str, self._workers.running))
        secs = _SAVING_GRACES * self._options.grace_secs
        recent = time.monotonic() - self._options.heartbeat_secs
        entries = [entry for said in self._snapshots().values() if said for entry in said.entries]
        if any(e.phase == "checkpointing" and e.since > recent for e in entries):
            self._set_deadline(secs, self._too_late)  # one says so again and again
            return
        self._verdict = Verdict(1, f"worker {late} did not end within {secs:g} s and was killed")
        if self._stop_code not in (0, exit_reports.INTERRUPTED):
            self._workers.kill()
        else:
            self._terminate(self._options.grace_secs)

    def _conclude(self) -> None:
        """Names the worker that died by itself, and not for want of the others."""
        first = min(self._faults, key=lambda event: (not died_by_itself(event), event.time))
        if (told := self._read_told()) is not None:
            self._conclude_told(told)
            return
        cause = end_of(first)
        if not died_by_itself(first):
            cause = self._after_a_stop(cause)
        self._verdict = Verdict(1, cause, restart=not self._stop_code)
        self._terminate(min(self._options.grace_secs, _AFTER_DEATH_SECS))

    def _read_told(self) -> exit_reports.ExitReport | None:
        """The first ending that was told; None if a worker had been killed before."""
        told = exit_reports.read(self._directory)
        killed = [event.time for event in self._faults if died_by_itself(event)]
        return None if told is None or min(killed, default=told.time) < told.time else told

    def _hear(self) -> None:
        """Names a worker that told of its end. If it did not raise, its exit code says more."""
        told = self._read_told() if self._verdict is None else None
        if told is None:
            return
        if told != self._told:
            self._told = told
            logger.error(f"worker {told.process} {told.words}{':' if told.trace else ''}")
            for line in told.trace.splitlines():
                logger.error(f"  {line}")
        if told.trace or any(event.worker == told.process for event in self._faults):
            self._conclude_told(told)

    def _conclude_told(self, told: exit_reports.ExitReport) -> None:
        """Lets the others end by themselves: they have heard of the ending, too."""
        cause = f"worker {told.process} {told.words}"
        codes = [event.returncode for event in self._faults if event.worker == told.process]
        if codes and not told.trace:
            cause += f" (exit code {codes[0]})"
        cause = self._after_a_stop(cause)
        code = told.code if told.code in (BAD_INPUT, exit_reports.INTERRUPTED) else 1
        has_begun = heartbeats.any_round(self._directory)
        if told.words.startswith(exit_reports.OF_INPUT) and not has_begun:
            code, cause = BAD_INPUT, f"{cause} (before the first round; nothing is restarted)"
        self._verdict = Verdict(code, cause, restart=code == 1 and not self._stop_code)
        self._set_deadline(self._options.grace_secs, self._workers.kill)

    def _look(self, now: float) -> None:
        late_secs, heartbeat_secs = now - self._next_look, self._options.heartbeat_secs
        self._next_look = now + min(heartbeat_secs / heartbeats.WRITES_PER_HEARTBEAT, 1.0)
        if late_secs > heartbeat_secs / 2:
            # This process or the whole machine was stopped; the workers may have been, too.
            self._next_look = now + heartbeat_secs
            return
        if self._verdict or self._faults or self._stop_code not in (0, exit_reports.INTERRUPTED):
            return
        snapshots = self._snapshots()
        stopped = self._stopped()
        if (fault := self._fault(snapshots, stopped)) is None:
            return
        logger.warning(f"hung: {fault.reason}")
        for index in snapshots if fault.process is None else [fault.process]:
            snapshot = snapshots[index]
            if index not in stopped and snapshot is not None and not snapshot.closed:
                kept = stacks.keep(self._directory, index, snapshot)
                where = f"are in {kept}" if kept else "were not written"
                logger.info(f"the stacks of worker {index} {where}")
        self._condemn(fault)

    def _fault(
        self, snapshots: Mapping[int, heartbeats.Snapshot | None], stopped: set[int]
    ) -> faults.Fault | None:
        """Who holds the others up."""
        return faults.find_fault(
            snapshots,
            now=time.monotonic(),
            launched=self._workers.launched,
            heartbeat_secs=self._options.heartbeat_secs,
            start_secs=self._options.start_secs,
            busy_secs=self._busy_secs,
            stopped=stopped,
        )

    def _condemn(self, fault: faults.Fault) -> None:
        """Ends the attempt."""
        self._verdict = Verdict(1, fault.reason, restart=not self._stop_code)
        self._terminate(self._options.grace_secs)

    def _snapshots(self) -> dict[int, heartbeats.Snapshot | None]:
        """What each worker that runs said last."""
        return {index: heartbeats.read(self._directory, index) for index in self._workers.running}

    def _stopped(self) -> set[int]:
        """Workers that something else has stopped: not the duty cycle, which continues them."""
        running, stops = self._workers.running, self._shares.stops
        return {k for k, pid in running.items() if not stops(k) and gang.is_stopped(pid)}

    def _after_a_stop(self, cause: str) -> str:
        stopped = self._stopped()
        return f"worker {min(stopped)}: stopped (SIGSTOP), and then {cause}" if stopped else cause

    def _terminate(self, grace_secs: float) -> None:
        if self._workers.running:
            self._workers.terminate()
            self._set_deadline(grace_secs, self._workers.kill)

    def _set_deadline(self, secs: float, action: Callable[[], None]) -> None:
        self._deadline = (time.monotonic() + secs, action)


def died_by_itself(event: gang.WorkerExit) -> bool:
    """Whether it died for no want of another worker: JAX aborts a process that has lost one."""
    return event.returncode < 0 and event.returncode != -signal.SIGABRT


def end_of(event: gang.WorkerExit) -> str:
    if event.returncode >= 0:
        return f"worker {event.worker} ended with exit code {event.returncode}"
    number = -event.returncode
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return f"worker {event.worker} ended by {name}"
