"""Does a run apart outlive a death, or a sleep, at every step of its round, in every role?

    python -m experiments.drills.each_step [--only=PATTERN,...] [--every=1] [--at_once=2]

A case is a step, a role and what is done to the worker that is there (`each_step_worker`):
`kill`; `sleep`, SIGSTOP until the others have left it out; `nap`, SIGSTOP for less than their
patience. The launcher is stopped for longer than that, or killed, too. Each run of four workers has
a dozen cases, one after the other. One case is at its begin, one at its end. In one run sums count
as large, so that one worker adds for all. At the end all workers must have the same parameters, and
so must one process that does the rounds again.
"""

import concurrent.futures
import contextlib
import fnmatch
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import command_line
from experiments.benchmarks import rows
from experiments.drills import each_step_run, each_step_worker
from experiments.drills.each_step_run import LATE_SECS, NAP_SECS, Case, Outcome
from experiments.drills.each_step_worker import WORKERS

_ONLY = flags.DEFINE_list("only", [], "Cases, as 'ready: */other/kill'.", allow_override=True)
_EVERY = flags.DEFINE_integer("every", 1, "Do one in so many cases.", 1, allow_override=True)
_KEEP = flags.DEFINE_string("keep", None, "A new directory for the runs.")
_AT_ONCE = flags.DEFINE_integer("at_once", 1, "Runs beside each other.", 1)

KINDS, ROLES = ("kill", "sleep", "nap"), ("leader", "other", "newcomer")
_CASES_OF_RUN, _MARGIN_SECS = 18, 5.0


def _around(*calls: str) -> tuple[str, ...]:
    return tuple(f"{call}: {when}" for call in calls for when in ("before", "sent", "answered"))


_BY_ALL = (
    *("round: begun", "round: computing", "round: decided", "round: applied"),
    *_around("ready", "confirm", "beat"),
    *("put: before", "put: half", "put: after"),
    *("take: before", "take: half", "take: after", "add: half", "add: after"),
)
_OF_DONOR = ("hand: due", "hand: before", "hand: half", "hand: after", *_around("donated"))
_OF_NEWCOMER = (
    *_around("enter", "joins", "asks", "holds", "lacks"),
    *("state: before", "state: after"),
)
_OF_LEADER = (
    *("line: before", "line: written"),
    *("save: before", "save: unsealed", "save: sealed", "save: begun"),
)
_OF_LARGE = {"adder": _around("summed"), "reader": ("read: before", "read: after")}
_OF_LAUNCHER = (
    *(("steady", "stop"), ("joining", "stop")),
    *(("steady", "long stop"), ("steady", "end")),
)


def cases() -> list[Case]:
    """Each step in each role that reaches it, with each kind."""
    reached = [
        *((step, role, 0, role == "newcomer") for step in _BY_ALL for role in ROLES),
        *((step, "leader", 0, True) for step in _OF_DONOR),
        *((step, "newcomer", 0, True) for step in _OF_NEWCOMER),
        *((step, "leader", 0, False) for step in _OF_LEADER),
        *((step, role, -1, False) for step in _around("begins") for role in ROLES[:2]),
        *((step, "leader", 1, False) for step in _around("finished")),
        *((step, "other", 1, False) for step in _around("ends")),
        *((step, role, 0, False) for role, steps in _OF_LARGE.items() for step in steps),
    ]
    by_workers = (Case(s, role, kind, at, of) for s, role, at, of in reached for kind in KINDS)
    return [*by_workers, *(Case("launcher", *each) for each in _OF_LAUNCHER)]


class Result(NamedTuple):
    """What came of a run."""

    outcomes: list[tuple[Outcome, float]]  # and the longest wait between two commits
    wrongs: list[str]
    rounds: int
    left_out: int  # naps
    ends: list[dict[str, Any]]  # what the workers told at its end


def _drilled(directory: pathlib.Path, some: list[Case]) -> Result:
    """A run with some cases, of which one may be at its begin, and one at its end."""
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    told = each_step_run.Told(directory / "told")
    first, last = (next((c for c in some if c.at == at), None) for at in (-1, 1))
    left = [case for case in some if case.at == 0]
    try:
        run = each_step_run.Run(directory, first, one_adds=some[0].role in _OF_LARGE)
        outcomes += [] if run.first is None else [run.first]
        for case, after in itertools.zip_longest(left, left[1:]):
            outcomes.append(run.hit(case, settles=after is None or not after.is_of_join))
            secs = outcomes[-1].ended - outcomes[-1].at
            print(f"{case}: {outcomes[-1].wrong or f'{secs:.1f} s'}", file=sys.stderr, flush=True)
        outcomes += run.end(last)
        wrong += wrongs(directory, WORKERS - (last is not None))
    except RuntimeError as error:
        wrong.append(str(error))
        done = {outcome.case for outcome in outcomes}
        outcomes += [Outcome(case, wrong="not done") for case in some if case not in done]
    gone = {pid: at for pid, (at, *_) in told.read().ends.items()}
    naps = [o for o in outcomes if o.case.kind == "nap" and not o.wrong]
    left_out = sum(gone.get(nap.pid, np.inf) < nap.at + NAP_SECS + LATE_SECS for nap in naps)
    times = np.sort(list(told.commits.values()))
    judged = [_judged(outcome, times) for outcome in outcomes]
    return Result(judged, wrong + told.different, len(times), left_out, _ends(directory))


def _ends(directory: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.glob("result.*")]


def wrongs(directory: pathlib.Path, least: int) -> Iterator[str]:
    """What is wrong with the end of a run, of which so many workers told at least."""
    ends, trace = _ends(directory), directory / "run" / "metrics.jsonl"
    if len(ends) < least or len({tuple(end["params"]) for end in ends}) != 1:
        yield f"{directory}: {len(ends)} workers ended, with parameters that differ or are missing"
        return
    if any(end[name] for end in ends for name in ("missing", "duplicated")):
        yield f"{directory}: examples are missing, or counted twice"
    numbers = [json.loads(line)["round"] for line in trace.read_text().splitlines()]
    if numbers != list(range(len(numbers))) or {end["lines"] for end in ends} != {len(numbers)}:
        yield f"{directory}: not each round has one line"
    again = each_step_worker.fit(
        local="virtual", cluster={"num_workers": WORKERS}, replay=os.fspath(trace)
    )
    params = np.array([float.fromhex(x) for x in ends[0]["params"]])
    if np.abs(params - again.params).max() > 1e-12 * np.abs(params).max():
        yield f"{directory}: parameters are {params}, in one process {np.asarray(again.params)}"


def _judged(outcome: Outcome, times: np.ndarray) -> tuple[Outcome, float]:
    """With the longest wait between two commits, where some that have the state live."""
    case = outcome.case
    if outcome.wrong or case.at or case.step == "launcher" or case.step.startswith("lacks"):
        return outcome, 0.0
    first, last = np.searchsorted(times, [outcome.at, outcome.ended])
    wait = float(np.diff(times[max(first - 1, 0) : last]).max(initial=0.0))
    # One that sleeps may hold up a round's sums, and then the next decision.
    if wait > (2 if case.kind == "sleep" else 1) * LATE_SECS + _MARGIN_SECS:
        outcome = outcome._replace(wrong=f"the others waited {wait:.1f} s")
    return outcome, wait


def _rows(results: list[Result]) -> rows.Found:
    judged = [each for result in results for each in result.outcomes]
    for name in (*KINDS, "launcher"):
        own = [each for each in judged if name in each[0].case]
        good, n = [not outcome.wrong for outcome, _ in own], len(own)
        yield rows.Row(f"{name}: ended well", "all", rows.share(good), n)
        if name in KINDS:
            target = f"≤ {2 if name == 'sleep' else 1}"
            longest = max((wait for _, wait in own), default=0.0) / LATE_SECS
            yield rows.Row(f"{name}: longest wait, in patiences", target, f"{longest:.2f}", n)
    naps, out = sum("nap" in o.case for o, _ in judged), sum(r.left_out for r in results)
    yield rows.Row("naps that were left out", "none", str(out), naps)
    ends, rounds = [e for r in results for e in r.ends], sum(r.rounds for r in results)
    most = [max((end[name] for end in ends), default=0) for name in ("missing", "duplicated")]
    yield rows.Row("examples missing, doubled", "0, 0", f"{most[0]}, {most[1]}", rounds)
    states = [len({tuple(end["params"]) for end in result.ends}) for result in results]
    yield rows.Row("states at the end of a run", "1", str(max(states)), len(results))
    wrong = sum(bool(result.wrongs) for result in results)
    yield rows.Row("runs that are wrong", "0", str(wrong), len(results))
    yield "Death, sleep and nap at every step of a round, in each role."
    yield f"The wait is between two commits; the patience is {LATE_SECS} s, a busy machine adds."
    yield "Wrong: a round without its one line, two views of one, not the state of one process."


def runs_of(wanted: list[Case]) -> list[list[Case]]:
    """The cases of each run, mixed; each has one at its begin at most, and one at its end. Those of
    large sums have runs of their own."""
    if large := [case for case in wanted if case.role in _OF_LARGE]:
        others = [case for case in wanted if case.role not in _OF_LARGE]
        runs = runs_of(others) if others else []
        return [*runs, random.Random(0).sample(large, len(large))]
    wanted = random.Random(0).sample(wanted, len(wanted))
    groups = [[case for case in wanted if case.at == at] for at in (-1, 0, 1)]
    count = max(len(groups[0]), len(groups[2]), -(-len(groups[1]) // _CASES_OF_RUN))
    return [[case for group in groups for case in group[k::count]] for k in range(count)]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    patterns = _ONLY.value or ["*"]
    wanted = [c for c in cases() if any(fnmatch.fnmatchcase(str(c), p) for p in patterns)]
    if not wanted:
        sys.exit(f"--only: there is no case {', '.join(patterns)}")
    runs = runs_of(wanted[:: _EVERY.value])
    with (
        contextlib.nullcontext(_KEEP.value)
        if _KEEP.value
        else tempfile.TemporaryDirectory() as made,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE.value) as threads,
    ):
        pathlib.Path(made).mkdir(exist_ok=True)
        places = [pathlib.Path(made, str(k)) for k in range(len(runs))]
        results = list(threads.map(_drilled, places, runs))
        rows.print_tables({"each_step": lambda: _rows(results)}, [])
    failed = [f"{o.case}: {o.wrong}" for r in results for o, _ in r.outcomes if o.wrong]
    failed += [each for result in results for each in result.wrongs]
    if failed:
        sys.exit("\n".join(["", *failed[:50]]))


if __name__ == "__main__":
    command_line.run(main)
