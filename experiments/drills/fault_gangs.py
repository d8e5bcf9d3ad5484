"""The fault drills that need gangs of real processes: kills, hangs and stops.

Each drill is a function of a `Session`: it runs trials while there is time, and writes a line of
results for each. What a gang printed goes to stderr where a trial was no success.
"""

import functools
import itertools
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from experiments.drills import fault_cases

STOP_SECS = 10.0
_KILLS_PER_GANG = 12
_ROUNDS_PER_KILL = 4
_HANGS = ("stopped", "callback", "loader")
_TOLD = ("worker", "launcher")

Record = dict[str, Any]


class Session(NamedTuple):
    """What a drill is given."""

    trials: int
    ends: float  # monotonic seconds; no new trial begins afterwards
    rng: random.Random
    directory: pathlib.Path  # for temporary files
    cache: pathlib.Path  # of compiled programs
    earlier: list[Record]  # lines of the drill's results
    write: Callable[[Record], None]  # one more
    show: bool = False  # what each gang printed, and not only where a trial was no success

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.ends


def new_directories(session: Session) -> Iterator[pathlib.Path]:
    """A directory for each trial, removed before the next."""
    while True:
        directory = pathlib.Path(tempfile.mkdtemp(dir=session.directory))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def each_in_turn(
    session: Session, drill: str, cases: Sequence[Any], one: Callable[[pathlib.Path, Any], Record]
) -> None:
    """One trial after another, of each case in turn; goes on where earlier runs have ended."""
    directories = new_directories(session)
    for trial in tqdm.trange(session.trials, desc=drill):
        if session.is_late:
            break
        case = cases[(trial + len(session.earlier)) % len(cases)]
        session.write(one(next(directories), case))


def _replays(run: pathlib.Path, config: Record, directory: pathlib.Path, session: Session) -> bool:
    """Whether an undisturbed gang that replays a run's trace ends in the same state."""
    again = fault_cases.nested({"replay": str(run / "metrics.jsonl")}, config)
    with fault_cases.Gang(directory / "replay", again, cache=session.cache) as gang:
        if gang.end() != 0:
            print(f"the replay failed:\n{gang.text}", file=sys.stderr)
            return False
    return fault_cases.are_bit_equal(run, gang.workdir)


# Kills


def kill(session: Session) -> None:
    """Kills workers of one gang after another; `trials` kills in all."""
    num_gangs = sum(record["drill"] == "kill_gang" for record in session.earlier)
    variants = itertools.islice(itertools.cycle(fault_cases.VARIANTS), num_gangs, None)
    directories = new_directories(session)
    with tqdm.tqdm(total=session.trials, desc="kill") as bar:
        while bar.n < session.trials and not session.is_late:
            num_kills = min(_KILLS_PER_GANG, session.trials - bar.n)
            kills, gang = kill_gang(next(directories), num_kills, *next(variants), session=session)
            for record in [*kills, gang]:
                session.write(record)
            bar.update(len(kills))


def kill_gang(
    directory: pathlib.Path,
    num_kills: int,
    num_workers: int,
    differences: Record,
    *,
    session: Session,
) -> tuple[list[Record], Record]:
    """The kills of one gang, and what was left of its run in the end."""
    rounds = 10 + _ROUNDS_PER_KILL * num_kills
    config = fault_cases.gang_config(num_workers, rounds, differences)
    options = (f"--max_restarts={10 * num_kills}", "--heartbeat_secs=20")
    kills: list[Record] = []
    with fault_cases.Gang(directory, config, *options, cache=session.cache) as gang:
        while len(kills) < num_kills and (record := _kill_one(gang, session.rng)):
            kills.append(record)
        code = gang.end()
    if kills:
        kills[-1]["recovered"] = code == 0
    for record in kills:
        told = gang.attempts[record.pop("attempt") + 1 :]
        secs = (told[0].first_secs if told else np.inf) - record.pop("killed")
        record["secs"] = round(secs, 2) if np.isfinite(secs) else None  # killed before a round
    is_whole = code == 0 and fault_cases.is_whole(gang.workdir)
    summary = json.loads((gang.workdir / "summary.json").read_text()) if code == 0 else {}
    result = {
        "drill": "kill_gang",
        "workers": num_workers,
        **differences,
        "kills": len(kills),
        "restarts": gang.restarts,
        "exit_code": code,
        "whole": is_whole,
        "missing": summary.get("examples_missing"),
        "duplicated": summary.get("examples_duplicated"),
        "bit_equal": is_whole and _replays(gang.workdir, config, directory, session),
    }
    is_named = all(record["named"] for record in kills)
    if session.show or not (is_named and result["bit_equal"] and gang.restarts == len(kills)):
        print(f"{kills}\n{result}\n{gang.text}", file=sys.stderr)
    return kills, result


def _kill_one(gang: fault_cases.Gang, rng: random.Random) -> Record | None:
    """Kills one worker and waits for the next attempt; None where the run was over before."""
    attempt = max(len(gang.attempts) - 1, 0)
    gang.wait(lambda: len(gang.now.pids) == gang.num_workers)
    if rng.random() < 0.15:  # while they join, restore and compile
        gang.wait(lambda: False, rng.uniform(0, 4))
    else:
        rounds = rng.randint(1, 9)
        gang.wait(lambda: gang.now.rounds_told >= rounds)
        time.sleep(rng.uniform(0, 0.04))
    told, victim = gang.now, rng.randrange(gang.num_workers)
    if gang.is_over or victim in told.ended or victim not in told.pids:
        return None
    killed = gang.send(signal.SIGKILL, told.pids[victim])
    gang.wait(lambda: len(gang.attempts) > attempt + 1)
    if len(gang.attempts) <= attempt + 1 and gang.end() == 0:
        return None  # it had done its work
    return {
        "drill": "kill",
        "worker": victim,
        "round": told.rounds.get(0, -1),  # -1: before the first of its attempt
        "named": f"worker {victim} ended by SIGKILL; restart {attempt + 1} of" in gang.text,
        "recovered": True,
        "attempt": attempt,
        "killed": killed,
    }


# Hangs


def hang(session: Session) -> None:
    """Hangs one worker a gang, in three ways."""
    each_in_turn(session, "hang", _HANGS, functools.partial(hang_one, session=session))


def hang_one(directory: pathlib.Path, kind: str, *, session: Session) -> Record:
    """Hangs a worker in the first attempt, and looks who noticed when."""
    rng = session.rng
    num_workers, heartbeat_secs = rng.randint(2, 4), rng.choice([2.0, 3.0])
    victim, at_round = rng.randrange(num_workers), rng.randint(2, 12)
    feed = {"data.feed": "streamed"} if kind == "loader" else {}
    config = fault_cases.gang_config(num_workers, 24, feed)
    options = (f"--heartbeat_secs={heartbeat_secs}", "--grace_secs=1")
    fault = "" if kind == "stopped" else f"{kind}:{victim}:{at_round}"
    began = np.inf
    with fault_cases.Gang(directory, config, *options, fault=fault, cache=session.cache) as gang:
        if kind == "stopped":
            gang.wait(lambda: gang.now.rounds.get(0, -1) >= at_round)
            if victim in gang.now.pids and not gang.is_over:
                began = gang.send(signal.SIGSTOP, gang.now.pids[victim])
        else:
            gang.wait(lambda: gang.now.hung)
            began = gang.now.hung.get(victim, np.inf)
        code = gang.end()
    noticed, line = gang.time_of("hetjax.launch: hung: ")
    heartbeats = (noticed - began) / heartbeat_secs
    record = {
        "drill": "hang",
        "kind": kind,
        "workers": num_workers,
        "heartbeat_secs": heartbeat_secs,
        "heartbeats": round(heartbeats, 2) if np.isfinite(heartbeats) else None,
        "named": f"hung: worker {victim}" in line,
        "went_on": code == 0 and gang.restarts == 1 and fault_cases.is_whole(gang.workdir),
    }
    if session.show or not (record["named"] and record["went_on"] and heartbeats <= 2):
        print(f"{record}, worker {victim}\n{gang.text}", file=sys.stderr)
    return record


# Stops


def stop(session: Session) -> None:
    """Stops one gang after another, by SIGTERM to a worker and to the launcher in turn."""
    each_in_turn(session, "stop", _TOLD, functools.partial(stop_one, session=session))


def stop_one(directory: pathlib.Path, to: str, *, session: Session) -> Record:
    """Stops a gang, resumes it with the same command, and replays what both did."""
    rng = session.rng
    num_workers, differences = rng.choice(fault_cases.VARIANTS)
    config = fault_cases.gang_config(num_workers, 40, differences)
    at_round, victim = rng.randint(1, 20), rng.randrange(num_workers)
    with fault_cases.Gang(directory, config, cache=session.cache) as gang:
        gang.wait(lambda: gang.now.rounds.get(0, -1) >= at_round)
        time.sleep(rng.uniform(0, 0.04))
        sent = gang.send(signal.SIGTERM, gang.now.pids.get(victim) if to == "worker" else None)
        code, secs = gang.end(), time.monotonic() - sent
    ended = set(gang.now.ended.values())
    with fault_cases.Gang(directory, config, cache=session.cache) as resumed:
        resumed_code = resumed.end()
    went_on = resumed_code == 0 and resumed.now.first_round == max(ended, default=-2) + 1
    record = {
        "drill": "stop",
        "to": to,
        "workers": num_workers,
        **differences,
        "round": at_round,
        "exit_code": code,
        "same_round": len(gang.now.ended) == num_workers and len(ended) == 1,
        "secs": round(secs, 2),
        "went_on": went_on,
        "bit_equal": went_on
        and fault_cases.is_whole(gang.workdir)
        and _replays(gang.workdir, config, directory, session),
    }
    is_good = record["bit_equal"] and record["same_round"] and code == 143 and secs <= STOP_SECS
    if session.show or not is_good:
        print(f"{record}\n{gang.text}\nresumed:\n{resumed.text}", file=sys.stderr)
    return record
