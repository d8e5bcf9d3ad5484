"""A run of the drill `each_step`: its launcher, what its workers tell, how one of them is hit."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.benchmarks import launched_runs
from experiments.drills.each_step_worker import ONE_ADDS, WORKERS
from hetjax.comm import local_carrier, membership

LATE_SECS, NAP_SECS = 1.5, 0.5
_SLEEP_SECS, _LONG_SECS = 1.5 * LATE_SECS, 35.0  # the latter: than a member waits for an answer
_LIMIT_SECS, _LOOK_SECS, _AGAIN_SECS = 60.0, 0.01, 15.0


class Case(NamedTuple):
    """A step, who is hit there, and how. Of the launcher: when, and how."""

    step: str
    role: str
    kind: str
    at: int = 0  # -1, 1: at the begin, at the end of a run
    is_of_join: bool = False  # it comes only where a worker joins

    def __str__(self) -> str:
        return "/".join(self[:3])


class Outcome(NamedTuple):
    """What came of a case; times in monotonic seconds."""

    case: Case
    at: float = 0.0  # when it was hit
    ended: float = 0.0
    pid: int = 0  # that was hit
    wrong: str = ""


class Told:
    """What the workers of a run have told so far.

    Args:
        path: of the file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._new = launched_runs.NewLines(path)
        self.pids: dict[tuple[int, int], int] = {}  # by attempt and start
        self.ends: dict[int, tuple[float, int, str]] = {}  # of processes: when, exit code, why
        self.views: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """By attempt and round: the starts of the members, and of those in the sum."""
        self.commits: dict[tuple[int, int], float] = {}
        self.different: list[str] = []  # rounds of which two things were decided

    def read(self) -> "Told":
        for line in self._new.read():
            what, at, pid, attempt, start, *more = json.loads(line)
            if what == "began":
                self.pids[attempt, start] = pid
            elif what == "ends":
                self.ends[pid] = (at, *more)
            else:
                key, view = (attempt, more[0]), tuple(more[1:])
                self.commits[key] = min(at, self.commits.get(key, at))
                if self.views.setdefault(key, view) != view:
                    self.different.append(f"round {key} has two views")
        return self

    @property
    def newest(self) -> tuple[int, int]:
        return max(self.views, default=(-1, -1))

    def members(self) -> list[int]:
        """The processes of the newest view; none where one of them was not in the sum."""
        members, added = self.views.get(self.newest, ([], []))
        whole = set(members) == set(added)
        return [self.pids[self.newest[0], start] for start in members if whole]


class Run:
    """A run that goes on.

    Args:
        directory: of its files.
        first: a case at its begin.
    """

    def __init__(self, directory: pathlib.Path, first: Case | None, *, one_adds: bool) -> None:
        self.directory, self._life = directory, 0
        self.said: list[str] = []
        self.told = Told(directory / "told")
        directory.mkdir()
        if one_adds:
            (directory / ONE_ADDS).touch()
        claim = None if first is None else self._want(first)
        self._launch()
        self.first = None if first is None or claim is None else self._claimed(first, claim)
        if not self._eventually(lambda: self._is_whole((0, 3))):
            raise self._error("the run did not begin")

    def _launch(self) -> None:
        command = [sys.executable, "-m", "hetjax.launch", f"--workers={WORKERS}", "--runtime=apart"]
        worker = [sys.executable, "-m", "experiments.drills.each_step_worker"]
        own = [*worker, os.fspath(self.directory), str(self._life)]
        self._life, self._may_end, found = self._life + 1, False, threading.Event()
        self._launcher = subprocess.Popen(
            [*command, "--max_restarts=9999", "--", *own],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HETJAX_LATE_SECS": str(LATE_SECS), "JAX_PLATFORMS": "cpu"},
        )
        threading.Thread(target=self._read, args=(found,), daemon=True).start()
        found.wait()
        run = re.findall(r"--add=(\S+)", "\n".join(self.said))
        self._run_directory = pathlib.Path(run[-1] if run else "none")

    def _read(self, found: threading.Event) -> None:
        assert self._launcher.stderr is not None
        for line in self._launcher.stderr:
            self.said.append(line.rstrip())
            if "--add=" in line:
                found.set()
        found.set()

    def _error(self, words: str) -> RuntimeError:
        self._launcher.terminate()
        self._launcher.wait()
        return RuntimeError("\n".join([f"{self.directory}: {words}:", *self.said[-40:]]))

    def _out(self) -> set[tuple[int, int]]:
        """Who is no member any more, as the referee has it."""
        attempt = str(self.told.read().newest[0] % 1000)
        carrier = local_carrier.LocalCarrier(self._run_directory / attempt)
        return set(carrier.call("watch", -1)[1])

    def _eventually(self, holds: Callable[[], Any], secs: float = _LIMIT_SECS) -> Any:
        """What `holds` gives as soon as it is true; what it gave at last, after so long."""
        ends = time.monotonic() + secs
        while not (found := holds()) and time.monotonic() < ends:
            if self._launcher.poll() is not None and not self._may_end:
                raise self._error("the run has ended")
            time.sleep(_LOOK_SECS)
        return found

    def _is_whole(self, after: tuple[int, int] = (-1, -1), without: int = 0) -> bool:
        """Whether all seats are members since a round, and have been in a sum."""
        members = self.told.read().members()
        return self.told.newest > after and len(members) == WORKERS and without not in members

    def _goes_on(self, without: int = 0) -> bool:
        attempt, number = self.told.read().newest
        return self._eventually(lambda: self._is_whole((attempt, number + 2), without))

    def _provoke(self) -> None:
        """Kills one that does not lead, so that another has to join."""
        os.kill(self.told.members()[-1], signal.SIGKILL)

    def _want(self, case: Case) -> pathlib.Path:
        """Says what is wanted; the path of what the one that claims it tells."""
        claim = "claim." + str(case).replace("/", ".").replace(" ", "")
        new = self.directory / "wanted.new"
        new.write_text(json.dumps({**case._asdict(), "claim": claim}))
        new.replace(self.directory / "wanted")
        return self.directory / claim

    def _attempts(self) -> int:
        """How often the run has begun anew, as where all that had the state were gone."""
        return sum("from the last checkpoint" in line for line in self.said)

    def hit(self, case: Case, *, settles: bool) -> Outcome:
        """Does a case, and waits until the run is whole again, where it is to."""
        attempts = self._attempts()
        if case.step == "launcher":
            outcome = self._end_launcher(case) if case.kind == "end" else self._stop_launcher(case)
            return outcome._replace(ended=time.monotonic())
        outcome = self._claimed(case, self._want(case))
        if not outcome.wrong:
            before = self.told.read().newest
            gone = outcome.pid if outcome.pid in self.told.ends or case.kind == "kill" else 0
            if not settles:
                self._eventually(lambda: self.told.read().newest > before)
            elif not self._goes_on(without=gone):
                outcome = outcome._replace(wrong="not all seats were members again")
        if self._attempts() > attempts and not case.step.startswith("lacks"):
            outcome = outcome._replace(wrong="all began anew from a checkpoint")
        return outcome._replace(ended=time.monotonic())

    def _claimed(self, case: Case, claim: pathlib.Path) -> Outcome:
        """Waits until a worker is hit; what becomes of that one."""
        ends = time.monotonic() + _LIMIT_SECS
        while not claim.exists() and time.monotonic() < ends:
            if case.is_of_join and self._is_whole():
                self._provoke()
            self._eventually(claim.exists, min(_AGAIN_SECS, ends - time.monotonic()))
        (self.directory / "wanted").unlink()
        if not claim.exists():
            return Outcome(case, wrong="was not reached")
        told = json.loads(claim.read_text())
        outcome, pid = Outcome(case, told["at"], time.monotonic(), told["pid"]), told["pid"]
        if case.kind == "kill":
            return outcome
        is_left_out = case.kind == "sleep" and told["known"] and not case.at
        is_left_out &= not case.step.startswith("lacks")  # then nobody is left who leaves it out
        time.sleep(NAP_SECS if case.kind == "nap" else _SLEEP_SECS)
        member, wrong = tuple(told["member"]), ""
        if is_left_out and not self._eventually(lambda: member in self._out()):
            wrong = "was not left out while it slept"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        if is_left_out and not self._eventually(lambda: pid in self.told.read().ends):
            wrong = "did not end itself when it awoke"
        elif is_left_out and self.told.ends[pid][1] != membership.LEFT_OUT:
            wrong = f"ended by {self.told.ends[pid]}"
        return outcome._replace(wrong=wrong)

    def _stop_launcher(self, case: Case) -> Outcome:
        """It is to leave out nobody."""
        if case.role == "joining":
            known = len(self.told.pids)
            self._provoke()
            self._eventually(lambda: len(self.told.read().pids) > known)
        outcome, out = Outcome(case, time.monotonic()), self._out()
        self._launcher.send_signal(signal.SIGSTOP)
        time.sleep(_LONG_SECS if case.kind == "long stop" else 2 * LATE_SECS)
        self._launcher.send_signal(signal.SIGCONT)
        if not self._goes_on():
            return outcome._replace(wrong="the run did not go on")
        more = self._out() - out
        return outcome._replace(wrong=f"left out: {more}" if more else "")

    def _end_launcher(self, case: Case) -> Outcome:
        """All workers are to end, and the next launcher goes on."""
        outcome, self._may_end = Outcome(case, time.monotonic()), True
        self._launcher.kill()
        self._launcher.wait()
        if not self._eventually(lambda: not any(map(_lives, self.told.read().pids.values()))):
            outcome = outcome._replace(wrong="workers outlived the launcher")
        before = self.told.read().newest
        self._launch()
        if not self._eventually(lambda: self._is_whole((before[0] + 1, 0))):
            outcome = outcome._replace(wrong="the run did not go on")
        return outcome

    def end(self, last: Case | None) -> list[Outcome]:
        """Has the run end, with a case at its end, if any."""
        claim, self._may_end = None if last is None else self._want(last), True
        attempts = self._attempts()
        (self.directory / "over").touch()
        outcomes = [] if last is None or claim is None else [self._claimed(last, claim)]
        try:
            code = self._launcher.wait(_LIMIT_SECS)
        except subprocess.TimeoutExpired:
            raise self._error("the run does not end") from None
        if code or self._attempts() > attempts:
            raise self._error(f"the run began anew at its end, or ended with {code}")
        return outcomes


def _lives(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
