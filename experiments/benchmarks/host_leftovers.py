"""What does a run leave on its machine when all of its processes are killed at once?

The runs are on hosts of their own (`engine_hosts.py`), so that all that is left there is theirs.
"""

import collections
import contextlib
import os
import pathlib
import random
import signal
import tempfile
import time
from typing import NamedTuple

from experiments.benchmarks import launched_runs
from experiments.benchmarks.rows import Row
from experiments.drills import engine_gangs, engine_hosts

KILLS = 20
_ROUNDS_PER_EPOCH, _EPOCHS = 5, 20
_MOST_SECS = 20.0  # to a kill that waits for no round
HOW = ("the launcher, but for its guardian", "the launcher and its guardian", "by hand, two hosts")
_GUARDIAN = "guardian.py"


class Left(NamedTuple):
    """What a killed run has left."""

    in_shared_memory: list[str]  # files in /dev/shm
    in_tmp: list[str]  # what lies in TMPDIR
    processes: list[str]  # command lines
    sockets: list[str]
    rounds: int  # that were done before


def one(seed: int) -> tuple[str, Left]:
    """Kills a run at a moment that the seed draws; how it was started, and what it has left."""
    rng = random.Random(seed)
    how = HOW[seed % len(HOW)]
    directory = pathlib.Path(tempfile.mkdtemp(dir=launched_runs.directory()))
    workdir, log = directory / "run", directory / "log"
    (directory / "tmp").mkdir()
    environment = launched_runs.environment() | {"TMPDIR": str(directory / "tmp")}
    command = launched_runs.train_command(
        workdir,
        None,
        data={"name": "digits"},
        epochs=_EPOCHS,
        cluster={"num_workers": engine_gangs.NUM_WORKERS},
        checkpoint={"every_rounds": 10},
    )
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(engine_hosts.Hosts(directory, "1gbit"))
        if how == HOW[2]:
            run: engine_hosts.ByHand | engine_gangs.EngineRun = engine_hosts.ByHand(
                command, workdir, log=log, hosts=hosts, environment=environment
            )
        else:
            launch = launched_runs.launch_command(engine_gangs.NUM_WORKERS, ())
            run = engine_gangs.EngineRun(
                [*hosts.inside(0), *launch, *command], workdir, environment=environment, log=log
            )
        stack.enter_context(run)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, _MOST_SECS))
        else:
            run.wait_for_round(rng.randrange(_EPOCHS * _ROUNDS_PER_EPOCH // 2))
        _kill_all(hosts, spares_guardian=how == HOW[0])
        with contextlib.suppress(TimeoutError):  # threads end after their process, the guardian too
            engine_gangs.until(lambda: not hosts.processes() and not hosts.unix_sockets(), secs=10)
        return how, Left(
            [name for place in hosts.places("/dev/shm") for name in os.listdir(place)],
            os.listdir(directory / "tmp"),
            list(hosts.processes().values()),
            hosts.unix_sockets(),
            engine_gangs.num_rounds(workdir),
        )


def _kill_all(hosts: engine_hosts.Hosts, *, spares_guardian: bool) -> None:
    """`kill -9` of all that runs on the hosts, and of what starts meanwhile."""

    def left() -> list[int]:
        found = hosts.processes().items()
        return [pid for pid, words in found if not (spares_guardian and _GUARDIAN in words)]

    while pids := left():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def rows(kills: int = KILLS) -> list[Row]:
    """Of all kills together."""
    if why := engine_hosts.missing():
        return [Row("killed runs that leave a file in shared memory", "0 of 20", f"none: {why}")]
    found = collections.defaultdict(list)
    for seed in range(kills):
        how, left = one(seed)
        found[how].append(left)
    all_left = [left for some in found.values() for left in some]
    of_each = "; ".join(
        f"{how}: {sum(bool(left.in_tmp) for left in some)} of {len(some)}"
        + "".join(
            sorted({f", {name.rpartition('-')[0]}-*" for left in some for name in left.in_tmp})
        )
        for how, some in found.items()
    )
    began = sum(left.rounds > 0 for left in all_left)
    return [
        Row(
            f"`kill -9` of all processes of a run at random moments, in {began} of {kills} when "
            "rounds had begun: runs that leave a file in /dev/shm",
            "0 of 20",
            f"{sum(bool(left.in_shared_memory) for left in all_left)} of {kills}",
        ),
        Row(
            "the same: that leave a process; a Unix socket",
            "0; 0",
            f"{sum(bool(left.processes) for left in all_left)}; "
            f"{sum(bool(left.sockets) for left in all_left)}",
        ),
        Row("the same: that leave something in TMPDIR, by what was killed", "none", of_each),
    ]
