"""Raises in one process of a run, and looks whether it is named, in words, and how soon.

As a program it is a script as a user writes it, which trains by `hetjax.fit`; one process raises

    HETJAX_DRILL_FAULT=callback:1:7 python -m hetjax.launch --workers=2 -- \
        python -m experiments.drills.fault_raises --config=FILE --workdir=DIR

at round 7 of the first attempt: in a callback, in the loss, in the source that the loader's thread
reads, in the script before or after `fit`; or it leaves by SystemExit, or somebody has replaced
`sys.excepthook`.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks import rows as rows_lib
from experiments.drills import fault_cases, fault_gangs
from experiments.drills.fault_gangs import Record, Session

KINDS = ("callback", "loss", "loader", "before", "after", "exit", "leave", "no_hook")
MOST_SECS = 2.0
_NUM_EXAMPLES = 203
_WORDS = {  # of the launcher, and of the other processes
    "exit": r"left by SystemExit\(3\)",
    "leave": "has come to its exit",
    "interrupt": r"was interrupted \(KeyboardInterrupt\)",
}
_RAISED = r"raised ValueError: .*of the drill"


# The program of a worker


def _fail(kind: str) -> None:
    os.write(1, f"drill: raises {time.monotonic_ns()}\n".encode())  # whole, from any thread
    if kind == "exit":
        sys.exit(3)
    if kind == "leave":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    raise ValueError("of the drill")


class _Source:
    """Examples, of which none can be read any more after the fault."""

    def __init__(self) -> None:
        self.is_broken = False

    def __len__(self) -> int:
        return _NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.is_broken:
            self.is_broken = False  # once, in whatever thread reads
            _fail("loader")
        x = np.random.default_rng(index).normal(size=5).astype(np.float32)
        return {"x": x, "y": x.sum()}


def _train(fields: dict[str, Any], workdir: str) -> None:
    import hetjax

    hetjax.join_processes()
    hetjax.use_cpu_workers(1)

    import optax

    kind, process, at_round = os.environ.get(fault_cases.FAULT_VARIABLE, ":-1:-1").split(":")
    if process != os.environ["HETJAX_PROCESS_ID"] or os.environ.get("HETJAX_ATTEMPT", "0") != "0":
        kind = ""
    source = _Source()

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        if kind == "loss":
            _fail(kind)
        return (batch["x"] @ params - batch["y"]) ** 2

    def on_round(line: Any) -> None:
        print("drill: round", line.round, flush=True)
        if line.round >= int(at_round):
            if kind in ("callback", "exit", "interrupt"):
                _fail(kind)
            source.is_broken = kind == "loader"

    if kind == "no_hook":
        sys.excepthook = lambda *error: print("drill: another hook", flush=True)
    if kind in ("before", "leave"):
        _fail(kind)
    for part in ("one", "two"):  # a script may have several runs
        hetjax.fit(
            loss_fn,
            np.zeros(5, np.float32),
            optax.sgd(0.01),
            source,
            callbacks=[on_round],
            workdir=pathlib.Path(workdir) / part,
            progress=False,
            **fields,
        )
        if part == "one" and kind in ("after", "no_hook"):
            _fail(kind)


def main() -> None:
    """The script; prints its process id as the other programs of the drills do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", required=True)
    given = parser.parse_args()
    print("drill: pid", os.getpid(), os.environ.get("HETJAX_ATTEMPT", "0"), flush=True)
    _train(json.loads(given.config.read_text()), given.workdir)


# The drill


def _fields(num_workers: int) -> Record:
    return {
        "epochs": 6,
        "microbatch_size": 8,
        "budget": 8,
        "data": {"feed": "streamed"},
        "cluster": {
            "num_workers": num_workers,
            "secs_per_microbatch": [0.004, 0.006, 0.008, 0.012][:num_workers],
        },
        "checkpoint": {"every_rounds": 3, "every_secs": 0},
    }


def run_all(session: Session) -> None:
    """Raises in one gang after another: under the launcher, and in processes started by hand."""
    cases = [(one, kind) for kind in KINDS for one in (launched, by_hand)]

    def run(directory: pathlib.Path, case: Any) -> Record:
        one, kind = case
        return one(directory, kind, session=session)

    fault_gangs.each_in_turn(session, "raise", cases, run)


def launched(directory: pathlib.Path, kind: str, *, session: Session) -> Record:
    """Seconds until the launcher names the process, and whether the gang went on."""
    num_workers, victim, at_round = _draw(session)
    words = _WORDS.get(kind, _RAISED)
    with fault_cases.Gang(
        directory,
        _fields(num_workers),
        fault=f"{kind}:{victim}:{at_round}",
        cache=session.cache,
        program="experiments.drills.fault_raises",
    ) as gang:
        code = gang.end()
        named, _ = gang.time_of(rf"hetjax.launch: worker {victim} {words}")
        restarted, _ = gang.time_of(r"; restart 1 of 3")
    raised = _raised_at(line for _, line in gang.lines)
    has_trace = bool(re.search(r"hetjax.launch:   ValueError: .*of the drill", gang.text))
    record = {
        "drill": "raise",
        "engine": "launcher",
        "kind": kind,
        "workers": num_workers,
        "secs": _rounded(named - raised),
        "restarted": _rounded(restarted - raised),
        "traced": has_trace or kind in _WORDS,
        "went_on": code == 0 and gang.restarts == 1 and _is_whole(gang.workdir),
    }
    is_soon = record["secs"] is not None and record["secs"] <= MOST_SECS
    is_good = record["traced"] and record["went_on"] and is_soon
    if session.show or not is_good:
        print(f"{record}, worker {victim}\n{gang.text}", file=sys.stderr)
    return record


def by_hand(directory: pathlib.Path, kind: str, *, session: Session) -> Record:
    """Seconds until all others have ended, each with words of whose fault it was."""
    num_workers, victim, at_round = _draw(session)
    fields = {name: value for name, value in _fields(num_workers).items() if name != "checkpoint"}
    (directory / "config.json").write_text(json.dumps(fields))
    common = fault_cases.environment(session.cache) | {
        fault_cases.FAULT_VARIABLE: f"{kind}:{victim}:{at_round}",
        "HETJAX_NUM_PROCESSES": str(num_workers),
        "HETJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    command = ["experiments.drills.fault_raises", f"--config={directory / 'config.json'}"]
    command.append(f"--workdir={directory / 'run'}")
    ends: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(one_of_several(command, directory / f"said-{index}", index, common))
            for index in range(num_workers)
        ]
        deadline = time.monotonic() + 120
        while len(ends) < num_workers and time.monotonic() < deadline:
            for index, process in enumerate(processes):
                if process.poll() is not None:
                    ends.setdefault(index, time.monotonic())
            time.sleep(0.01)
    said = [(directory / f"said-{index}").read_text() for index in range(num_workers)]
    words = rf"process {victim} {_WORDS.get(kind, _RAISED)}"
    others = [index for index in range(num_workers) if index != victim]
    raised = _raised_at(said[victim].splitlines())
    secs = max(ends.get(index, np.inf) for index in range(num_workers)) - raised
    record = {
        "drill": "raise",
        "engine": "by hand",
        "kind": kind,
        "workers": num_workers,
        "secs": _rounded(secs),
        "said": all(re.search(words, said[index]) for index in others),
        "codes": all(process.returncode for process in processes),
    }
    if session.show or not (record["said"] and record["codes"] and np.isfinite(secs)):
        print(f"{record}, process {victim}\n" + "\n---\n".join(said), file=sys.stderr)
    return record


def _draw(session: Session) -> tuple[int, int, int]:
    """Processes, which of them raises, and after which round."""
    num_workers = session.rng.randint(2, 4)
    return num_workers, session.rng.randrange(num_workers), session.rng.randint(2, 12)


@contextlib.contextmanager
def one_of_several(
    command: Sequence[str], path: pathlib.Path, index: int, common: dict[str, str]
) -> Iterator[subprocess.Popen]:
    """One of several that are started by hand; what it says goes to a file."""
    with path.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=fault_cases.ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **common, "HETJAX_PROCESS_ID": str(index)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _rounded(secs: float) -> float | None:
    """None where one of the two times is not known."""
    return round(float(secs), 2) if np.isfinite(secs) else None


def _raised_at(lines: Any) -> float:
    """Monotonic seconds; the clock is that of the machine."""
    found = (re.search(r"drill: raises (\d+)", line) for line in lines)
    return next((int(match[1]) / 1e9 for match in found if match), np.inf)


def _is_whole(workdir: pathlib.Path) -> bool:
    """Whether both runs of the script have done every example of every epoch once."""
    summaries = [json.loads((workdir / p / "summary.json").read_text()) for p in ("one", "two")]
    return all(
        not told["interrupted"]
        and told["examples_missing"] == told["examples_duplicated"] == 0
        and told["examples_processed"] == 6 * _NUM_EXAMPLES
        for told in summaries
    )


def rows(records: Sequence[Record]) -> rows_lib.Found:
    """The figures of all runs of the drill."""
    if own := [r for r in records if r["engine"] == "launcher"]:
        secs = _secs(own, "secs")
        went_on = [r["traced"] and r["went_on"] for r in own]
        good = [w and s <= MOST_SECS for w, s in zip(went_on, secs, strict=True)]
        reached = f"{rows_lib.share(good)}, at most {max(secs):.1f} s"
        target = f"all, ≤ {MOST_SECS:g} s"
        yield rows_lib.Row("a worker that raises: named and restarted", target, reached, len(own))
        again = rows_lib.most(_secs(own, "restarted"), ".1f", " s")
        yield rows_lib.Row("… until all start again", "none", again, len(own))
    if own := [r for r in records if r["engine"] == "by hand"]:
        secs = _secs(own, "secs")
        said = [r["said"] and r["codes"] for r in own]
        good = [s and np.isfinite(t) for s, t in zip(said, secs, strict=True)]
        name = "… by hand: all others say why, end"
        yield rows_lib.Row(name, "all", rows_lib.share(good), len(own))
        last = rows_lib.most(secs, ".1f", " s")
        yield rows_lib.Row("… until the last has ended", "none", last, len(own))


def _secs(records: Sequence[Record], key: str) -> list[float]:
    return [np.inf if record[key] is None else record[key] for record in records]


if __name__ == "__main__":
    main()
