"""Does a run apart outlive a death, or a sleep, at every step of its round, in every role?

    python -m experiments.drills.each_step [--only=PATTERN,...] [--every=1] [--at_once=2]

A case is a step, a role and what is done to the worker that is there (`each_step_worker`):
`kill`; `sleep`, SIGSTOP until the others have left it out; `nap`, SIGSTOP for less than their
patience. Each run of four workers has a few dozen of them, one after the other; the next begins
when all seats are members again. Then the run's traces are held to the model
(`each_step_traces`), and its rounds are done again in one process.
"""

import concurrent.futures
import contextlib
import fnmatch
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import command_line
from experiments.benchmarks import rows
from experiments.drills import each_step_traces as traces_lib
from experiments.drills import each_step_worker
from hetjax.comm import file_store
from hetjax.comm.membership import MembershipView, view_of

_ONLY = flags.DEFINE_list("only", [], "Cases, as 'told: */other/kill'.", allow_override=True)
_EVERY = flags.DEFINE_integer("every", 1, "Do one in so many cases.", 1, allow_override=True)
_KEEP = flags.DEFINE_string("keep", None, "A new directory for traces and runs.")
_AT_ONCE = flags.DEFINE_integer("at_once", 1, "Runs beside each other.", 1)

WORKERS, KINDS, ROLES = 4, ("kill", "sleep", "nap"), ("proposer", "other", "joiner")
_CASES_OF_RUN = 44  # newcomers are handed all lines of a run, so one is not to become too long
_LATE_SECS, _NAP_SECS, _MARGIN_SECS = 1.5, 0.5, 5.0
_LIMIT_SECS, _LOOK_SECS, _AGAIN_SECS = 60.0, 0.01, 15.0

_BY_ALL = (
    *("round: begun", "round: computing"),
    *("own: before", "own: half", "own: written", "own: ended"),
    *("told: before", "told: half", "told: written", "told: ended", "told: ready"),
    *("told: looked at 1", "decide: adopted"),
    *("added: looked at 1", "look: passed", "round: applied"),
)
_BY_ADDER = (  # a newcomer adds nothing in its first round
    *("added: before", "added: half", "added: summed", "added: written", "added: ended"),
    *("own: looked at 1", "own: looked at 2"),
)
_BY_ONE = {
    "proposer": (
        *("decide: before", "decide: file", "decide: linked", "decide: returned"),
        *("line: before", "line: written", "save: before", "save: unsealed", "save: begun"),
    ),
    "other": ("decide: heard",),
    "donor": ("hand: due", "hand: before", "hand: half", "hand: written"),
    "joiner": ("ask: before", "ask: asked", "take: named", "take: read", "take: taken"),
}


class Case(NamedTuple):
    step: str
    role: str
    kind: str

    def __str__(self) -> str:
        return "/".join(self)


def cases() -> list[Case]:
    """Each step in each role that reaches it, with each kind."""
    reached = [(step, role) for step in _BY_ALL for role in ROLES]
    reached += [(step, role) for step in _BY_ADDER for role in ROLES if role != "joiner"]
    reached += [(step, role) for role, steps in _BY_ONE.items() for step in steps]
    return [Case(step, role, kind) for step, role in reached for kind in KINDS]


class Outcome(NamedTuple):
    """What came of a case; times in monotonic seconds."""

    case: Case
    at: float = 0.0  # when it was hit
    ended: float = 0.0
    start: int = -1  # that was hit
    is_left_out: bool = False
    wrong: str = ""


class Result(NamedTuple):
    """What came of a run."""

    outcomes: list[Outcome]
    waits: dict[str, float]  # the longest between two commits in cases of a kind
    counts: np.ndarray  # rounds, processes, decisions adopted, rounds applied
    amounts: np.ndarray  # examples missing, doubled
    wrongs: list[str]


class _Run:
    """A run that goes on, in a directory of its own."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.said = directory, []
        own = [sys.executable, "-m", "experiments.drills.each_step_worker", os.fspath(directory)]
        command = [sys.executable, "-m", "hetjax.launch", f"--workers={WORKERS}", "--runtime=apart"]
        self.launcher = subprocess.Popen(
            [*command, "--max_restarts=9999", "--", *own],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HETJAX_LATE_SECS": str(_LATE_SECS), "JAX_PLATFORMS": "cpu"},
        )
        self.killed: dict[int, float] = {}
        """When each start was killed."""
        self._is_lost = False
        found = threading.Event()
        threading.Thread(target=self._read, args=(found,), daemon=True).start()
        found.wait()
        run = re.search(r"--add=(\S+)", "\n".join(self.said))
        self._board = (
            None if run is None else file_store.FileStore(pathlib.Path(run[1], "0", "board"))
        )

    def _read(self, found: threading.Event) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            self.said.append(line.rstrip())
            self._is_lost |= "from the last checkpoint" in line
            if "--add=" in line:
                found.set()
        found.set()

    def newest(self) -> MembershipView | None:
        """The last decision that stands."""
        assert self._board is not None
        try:
            texts = [text for _, text in self._board.key_value_dir_get("decision/")]
        except FileNotFoundError:
            return None
        made = [view_of(json.loads(text)) for text in texts if text]
        return max(made, key=lambda decision: decision.number, default=None)

    def eventually(self, holds: Callable[[], Any], secs: float = _LIMIT_SECS) -> Any:
        """What `holds` gives as soon as it is true; what it gave at last, after so long."""
        ends = time.monotonic() + secs
        while not (found := holds()) and time.monotonic() < ends:
            if self._is_lost or self.launcher.poll() is not None:
                raise RuntimeError("\n".join(["the run has ended:", *self.said[-40:]]))
            time.sleep(_LOOK_SECS)
        return found

    def is_whole(self, after: int = 0, without: int = -1) -> bool:
        """Whether all seats are members since a round, and have been in a sum."""
        last = self.newest()
        return (
            last is not None
            and last.number > after
            and len(last.members) == WORKERS
            and set(last.sum) == set(last.members)
            and all(member.incarnation != without for member in last.members)
        )

    def pid(self, start: int) -> int:
        with open(self.directory / f"trace.{start}") as file:
            return int(traces_lib.Event(*json.loads(file.readline())).more["pid"])

    def provoke(self) -> None:
        """Kills one that does not lead, so that another has to join."""
        last = self.newest()
        assert last is not None
        start = last.members[-1].incarnation
        self.killed[start] = time.monotonic()
        os.kill(self.pid(start), signal.SIGKILL)

    def hit(self, number: int, case: Case) -> Outcome:
        """Does a case, and waits until the run is whole again."""
        directory, claim = self.directory, self.directory / f"claim.{number}"
        new = directory / "wanted.new"
        new.write_text(json.dumps({**case._asdict(), "case": number}))
        new.replace(directory / "wanted")
        ends = time.monotonic() + _LIMIT_SECS
        while not claim.exists() and time.monotonic() < ends:
            if case.role in ("donor", "joiner") and self.is_whole():
                self.provoke()
            self.eventually(claim.exists, min(_AGAIN_SECS, ends - time.monotonic()))
        (directory / "wanted").unlink()
        if not claim.exists():
            return Outcome(case, wrong="was not reached")
        told = json.loads(claim.read_text())
        start, at = told["start"], told["at"]
        outcome = Outcome(case, at, start=start)
        if case.kind == "kill":
            self.killed[start] = at
        else:
            outcome = self._awake(outcome, told["pid"])
        last = self.newest()
        assert last is not None
        # A napping worker may go on; one that has not asked yet is no loss.
        gone = -1 if case.kind == "nap" or case.step == "ask: before" else start
        if not self.eventually(lambda: self.is_whole(last.number + 2, without=gone)):
            outcome = outcome._replace(wrong="not all seats were members again")
        return outcome._replace(ended=time.monotonic())

    def _awake(self, outcome: Outcome, pid: int) -> Outcome:
        """Lets one go on that was stopped, when its time has come."""
        if outcome.case.kind == "nap":
            time.sleep(_NAP_SECS)
        else:
            time.sleep(1.5 * _LATE_SECS)  # one that has not asked yet is no member

            def is_left_out() -> bool:
                last = self.newest()
                return last is not None and outcome.incarnation not in {
                    m.incarnation for m in last.members
                }

            if not self.eventually(is_left_out, _LIMIT_SECS / 2):
                outcome = outcome._replace(wrong="was not left out while it slept")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return outcome

    def end(self) -> None:
        (self.directory / "over").touch()
        try:
            code = self.launcher.wait(_LIMIT_SECS)
        except subprocess.TimeoutExpired:
            self.launcher.terminate()
            self.launcher.wait()
            raise RuntimeError("\n".join(["the run does not end:", *self.said[-40:]])) from None
        if code:
            raise RuntimeError("\n".join([f"the run ended with {code}:", *self.said[-40:]]))


def _drilled(directory: pathlib.Path, some: list[tuple[int, Case]]) -> Result:
    """A run with some cases."""
    directory.mkdir()
    run, outcomes, wrongs = _Run(directory), [], []
    try:
        if not run.eventually(lambda: run.is_whole(3)):
            raise RuntimeError("\n".join(["the run did not begin:", *run.said[-40:]]))
        for number, case in some:
            outcomes.append(outcome := run.hit(number, case))
            took = outcome.ended - outcome.at
            print(f"{number} {case}: {outcome.wrong or f'{took:.1f} s'}", file=sys.stderr)
        run.end()
        amounts = _ended(directory, wrongs)
    except RuntimeError as error:
        wrongs.append(str(error))
        outcomes += [Outcome(case, wrong="not done") for _, case in some[len(outcomes) :]]
        amounts = np.zeros(2, int)
        run.launcher.terminate()
        run.launcher.wait()
    return _judged(directory, outcomes, run.killed, wrongs, amounts)


def _judged(
    directory: pathlib.Path,
    outcomes: list[Outcome],
    killed: Mapping[int, float],
    wrongs: list[str],
    amounts: np.ndarray,
) -> Result:
    traces = traces_lib.read(directory)
    wrongs += traces_lib.wrongs(traces, killed=killed, patience=_LATE_SECS)
    times = np.sort(list(traces_lib.commits(traces).values()))
    left = {start for start, event in traces_lib.all_of(traces, "ends")}
    waits, judged = dict.fromkeys(KINDS, 0.0), []
    for outcome in outcomes:
        if outcome.wrong:
            judged.append(outcome)
            continue
        first, last = np.searchsorted(times, [outcome.at, outcome.ended])
        longest = float(np.diff(times[max(first - 1, 0) : last]).max(initial=0.0))
        kind = outcome.case.kind
        waits[kind] = max(waits[kind], longest)
        # One that sleeps may hold up a round's sums, and then the next decision.
        if longest > (2 if kind == "sleep" else 1) * _LATE_SECS + _MARGIN_SECS:
            outcome = outcome._replace(wrong=f"the others waited {longest:.1f} s")
        judged.append(outcome._replace(is_left_out=outcome.incarnation in left))
    adopted, applied = (
        sum(1 for _ in traces_lib.all_of(traces, e)) for e in ("adopted", "applied")
    )
    counts = np.array([len(times), len(traces), adopted, applied])
    return Result(judged, waits, counts, amounts, wrongs)


def _ended(directory: pathlib.Path, wrongs: list[str]) -> np.ndarray:
    """Examples missing and doubled; adds what is wrong with the end of a run."""
    ends = [json.loads(path.read_text()) for path in directory.glob("result.*")]
    if len(ends) != WORKERS or len({tuple(end["params"]) for end in ends}) != 1:
        wrongs.append(f"{len(ends)} workers ended, with parameters that differ or are missing")
        return np.zeros(2, int)
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["round"] for line in lines]
    if numbers != list(range(len(numbers))) or {end["lines"] for end in ends} != {len(numbers)}:
        wrongs.append("not each round has one line")
    again = each_step_worker.fit(
        local="virtual",
        cluster={"num_workers": WORKERS},
        replay=os.fspath(directory / "run" / "metrics.jsonl"),
    )
    params = np.array([float.fromhex(x) for x in ends[0]["params"]])
    if not np.allclose(params, again.params, rtol=1e-12, atol=0):
        wrongs.append(f"parameters are {params}, in one process {np.asarray(again.params)}")
    return np.array([[end["missing"], end["duplicated"]] for end in ends]).max(axis=0)


def _rows(results: list[Result]) -> rows.Found:
    outcomes = [outcome for result in results for outcome in result.outcomes]
    for kind in KINDS:
        own = [outcome for outcome in outcomes if outcome.case.kind == kind]
        good = [not outcome.wrong for outcome in own]
        yield rows.Row(f"{kind}: ended well", "all", rows.share(good), len(own))
        longest = max(result.waits[kind] for result in results) / _LATE_SECS
        target = f"≤ {2 if kind == 'sleep' else 1}"
        yield rows.Row(f"{kind}: longest wait, in patiences", target, f"{longest:.2f}", len(own))
    naps = [o for o in outcomes if o.case.kind == "nap" and not o.wrong]
    out = [outcome.is_left_out for outcome in naps]
    yield rows.Row("naps that were left out", "none", rows.share(out), len(naps))
    missing, doubled = sum(result.amounts for result in results)
    rounds, starts, adopted, applied = sum(result.counts for result in results)
    yield rows.Row("examples missing, doubled", "0, 0", f"{missing}, {doubled}", rounds)
    wrongs = sum(len(result.wrongs) for result in results)
    yield rows.Row("traces not as in the model", "0", str(wrongs), starts)
    yield "Death, sleep and nap at every step of a round, in each role."
    yield f"The wait is between two commits; the patience is {_LATE_SECS} s, a busy machine adds."
    yield f"Traces: {rounds:,} rounds, {adopted:,} decisions adopted, {applied:,} sums applied."
    yield "Also not as in the model: a round without its one line, another state."


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    patterns = _ONLY.value or ["*"]
    wanted = [c for c in cases() if any(fnmatch.fnmatchcase(str(c), p) for p in patterns)]
    wanted = list(enumerate(wanted))[:: _EVERY.value]
    if not wanted:
        sys.exit(f"--only: there is no case {', '.join(patterns)}")
    runs = -(-len(wanted) // _CASES_OF_RUN)
    with (
        contextlib.nullcontext(_KEEP.value)
        if _KEEP.value
        else tempfile.TemporaryDirectory() as made,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE.value) as threads,
    ):
        pathlib.Path(made).mkdir(exist_ok=True)
        each = [(pathlib.Path(made, str(k)), wanted[k::runs]) for k in range(runs)]
        results = list(threads.map(lambda run: _drilled(*run), each))
        rows.print_tables({"each_step": lambda: _rows(results)}, [])
    failed = [f"{o.case}: {o.wrong}" for r in results for o in r.outcomes if o.wrong]
    failed += [wrong for result in results for wrong in result.wrongs]
    if failed:
        sys.exit("\n".join(["", *failed[:50]]))


if __name__ == "__main__":
    command_line.run(main)
