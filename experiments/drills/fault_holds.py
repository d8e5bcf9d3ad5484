"""Holds one process of a run that no launcher started, and looks whether the others name it.

As a program it is a script as a user writes it, which trains by `hetjax.fit`; one process holds the
others up for some seconds

    HETJAX_DRILL_FAULT=callback:1:3 HETJAX_DRILL_SECS=13 HETJAX_PROCESS_ID=1 … \
        python -m experiments.drills.fault_holds

at round 3: in a callback; in the source of its data; stopped, as by Ctrl-Z; frozen, in a function
that keeps the interpreter; between the gathering and the synchronisation, where the others are in a
collective; or, whatever the round, before it joins, in the script before `fit`,
while its loss is traced, or after `fit`, before its exit.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.benchmarks import rows as rows_lib
from experiments.drills import fault_cases, fault_gangs, fault_raises
from experiments.drills.fault_gangs import Record, Session

KINDS = ("callback", "loader", "stopped", "frozen", "sync", "trace", "script", "exit", "join")
MOST_SECS = 60.0
_HOLD_SECS = 13
_SECS_VARIABLE = "HETJAX_DRILL_SECS"
_NUM_EXAMPLES = 203


# The program of a process


def _hold(kind: str) -> None:
    secs = int(os.environ[_SECS_VARIABLE])
    print("drill: holds", time.monotonic_ns(), flush=True)
    if kind == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {secs}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "frozen":
        ctypes.PyDLL(None).sleep(secs)
    else:
        time.sleep(secs)
    print("drill: goes on", time.monotonic_ns(), flush=True)


def main() -> None:
    """The script; its process is held once, where the environment says it."""
    kind, process, at_round = os.environ[fault_cases.FAULT_VARIABLE].split(":")
    left = [kind] if process == os.environ["HETJAX_PROCESS_ID"] else []

    def hold(*kinds: str) -> None:
        if left and left[0] in kinds:
            _hold(left.pop())

    class Source:
        is_due = False

        def __len__(self) -> int:
            return _NUM_EXAMPLES

        def __getitem__(self, index: int) -> dict[str, Any]:
            if self.is_due:
                hold("loader")
            x = np.random.default_rng(index).normal(size=5).astype(np.float32)
            return {"x": x, "y": x.sum()}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        hold("trace")
        return (batch["x"] @ params - batch["y"]) ** 2

    def on_round(line: Any) -> None:
        if line.round >= int(at_round):
            hold("callback", "stopped", "frozen")
            source.is_due = True

    hold("join")
    import hetjax

    hetjax.join_processes()
    hetjax.use_cpu_workers(1)

    import optax

    from hetjax.comm import allgather_work

    source = Source()
    gather = allgather_work.WorkAllGather.__call__

    def gather_and_hold(*args: Any) -> Any:
        found = gather(*args)
        if source.is_due:
            hold("sync")
        return found

    allgather_work.WorkAllGather.__call__ = gather_and_hold  # type: ignore[method-assign]
    hold("script")
    hetjax.fit(
        loss_fn,
        np.zeros(5, np.float32),
        optax.sgd(0.01),
        source,
        callbacks=[on_round],
        progress=False,
        epochs=3,
        microbatch_size=8,
        budget=8,
        quota={"policy": "equal"},  # so that each process has examples to read
        data={"feed": "streamed"},
        cluster={"num_workers": int(os.environ["HETJAX_NUM_PROCESSES"])},
    )
    hold("exit")


# The drill


def run_all(session: Session) -> None:
    """Holds a process of one gang after another, in each way in turn."""

    def run(directory: pathlib.Path, kind: str) -> Record:
        num_workers = session.rng.randint(2, 4)
        victim = session.rng.randrange(num_workers)
        return hold_one(directory, kind, num_workers, victim, session=session)

    fault_gangs.each_in_turn(session, "hold", KINDS, run)


def hold_one(
    directory: pathlib.Path, kind: str, num_workers: int, victim: int, *, session: Session
) -> Record:
    """Seconds until the last of the others has named the process that is held."""
    common = fault_cases.environment(session.cache) | {
        fault_cases.FAULT_VARIABLE: f"{kind}:{victim}:3",
        _SECS_VARIABLE: str(_HOLD_SECS),
        "HETJAX_NUM_PROCESSES": str(num_workers),
        "HETJAX_COORDINATOR": f"127.0.0.1:{fault_raises.free_port()}",
    }
    at_join = kind == "join"  # nobody knows more than the number of one that has not joined
    paths = [directory / f"said-{index}" for index in range(num_workers)]
    others = [index for index in range(num_workers) if index != victim]
    named: dict[int, float] = {}
    command = ["experiments.drills.fault_holds"]
    with contextlib.ExitStack() as stack:
        gang = [
            stack.enter_context(fault_raises.one_of_several(command, path, index, common))
            for index, path in enumerate(paths)
        ]
        words = f"{victim}\\b" + ("" if at_join else rf".*pid {gang[victim].pid} on ")
        deadline = time.monotonic() + 240
        while any(one.poll() is None for one in gang) and time.monotonic() < deadline:
            for other in others:
                line = rf"process {other} .*(waited|hears).* process(es)? ([\d, ]*\b)?{words}"
                if other not in named and re.search(line, paths[other].read_text()):
                    named[other] = time.monotonic()
            time.sleep(0.05)
        codes = [one.poll() for one in gang]
    said = [path.read_text() for path in paths]
    began = re.search(r"drill: holds (\d+)", said[victim])
    secs = max((named.get(other, np.inf) for other in others), default=np.inf)
    secs -= int(began[1]) / 1e9 if began else np.inf
    record = {
        "drill": "hold",
        "kind": kind,
        "workers": num_workers,
        "victim": victim,
        "named": len(named),
        "secs": round(float(secs), 2) if np.isfinite(secs) else None,
        "went_on": codes == [0] * num_workers,
    }
    if session.show or record["secs"] is None or not record["went_on"]:
        print(f"{record}\n" + "\n---\n".join(said), file=sys.stderr)
    return record


def rows(records: Sequence[Record]) -> rows_lib.Found:
    """The figures of all runs of the drill."""
    if not records:
        return
    good = [r["secs"] is not None and r["secs"] <= MOST_SECS for r in records]
    waiting, named = sum(r["workers"] - 1 for r in records), sum(r["named"] for r in records)
    most = max((r["secs"] or np.inf) for r in records)
    name, target = f"held {_HOLD_SECS} s, by hand: all name it", f"all, ≤ {MOST_SECS:g} s"
    reached = f"{rows_lib.share(good)}, at most {most:.1f} s"
    yield rows_lib.Row(name, target, reached, len(records))
    yield rows_lib.Row("… by the waiting processes", "all", f"{named} of {waiting}", len(records))
    went_on = [r["went_on"] for r in records]
    yield rows_lib.Row("… and all went on", "all", rows_lib.share(went_on), len(records))


if __name__ == "__main__":
    main()
