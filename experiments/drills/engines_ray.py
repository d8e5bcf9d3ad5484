"""One repetition of the drill of engines on Ray: join, a kill at a random round, go on, compare.

The actors have unequal resources; which of them is killed, and at which round, a seed draws. The
run that they go on with is compared with an undisturbed one under hetjax's launcher. Parts of the
seconds from a kill to the first new round: until Ray has made the new process 0; imports, until the
last process has done them; joining; the data; compiling; the checkpoint and the new round.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import hetjax
from experiments.drills import fault_cases

RESOURCES: list[dict[str, float]] = [{"CPU": 1, "GPU": 1}, {"CPU": 2}]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
EPOCHS, ROUNDS_PER_EPOCH, _LAST_KILL = 15, 5, 40
_FIT = hetjax.fit  # so it is imported with this module, before a process joins
_READ = time.monotonic()


# The run


def work(directory: pathlib.Path) -> Any:
    """What each process runs: static quotas 2:1, rounds of 35 ms, a checkpoint every third.

    Args:
        directory: gets the workdir `run`, and files that tell how far the processes are.
    """
    about = {"made": _made(), "read": _READ, "joined": time.monotonic()}
    own = jax.process_index()
    with contextlib.suppress(FileExistsError), (directory / f"began-{own}").open("x") as file:
        file.write(str(os.getpid()))  # of the first attempt alone

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2

    def on_round(report: Any) -> None:
        if own == 0:
            with (directory / "rounds").open("a") as file:
                print(os.getpid(), report.round, time.monotonic(), file=file)

    x = np.random.default_rng(0).normal(size=(203, 16)).astype(np.float32)
    about["loaded"] = time.monotonic()
    result = _FIT(
        loss,
        {"w": np.zeros(16, np.float32), "b": np.float32(0.0)},
        optax.sgd(0.01, momentum=0.9),
        {"x": x, "y": np.sin(x[:, 0])},
        callbacks=[on_round],
        eval_source={"x": x, "y": np.sin(x[:, 0])},
        epochs=EPOCHS,
        microbatch_size=8,
        budget=6,
        quota=hetjax.quota.static(proportions=[2.0, 1.0]),
        cluster={"secs_per_microbatch": (0.008, 0.016)},
        checkpoint={"every_rounds": 3, "every_secs": 0},
        workdir=directory / "run",
        progress=False,
    )
    about["compiling"] = result.summary["start"]["compiling"]
    (directory / f"about-{own}").write_text(json.dumps(about))
    return result


def _made() -> float:
    """When this process was made, as monotonic seconds (Linux)."""
    ticks = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def launched(directory: pathlib.Path, max_failures: int = 1) -> Any:
    """Runs `work` as actors with unequal resources; its result, a `SavedRun`."""
    directory.mkdir(parents=True, exist_ok=True)
    function = functools.partial(work, directory)
    return hetjax.ray.launch(function, RESOURCES, max_failures=max_failures)


def reference(directory: pathlib.Path) -> pathlib.Path:
    """The workdir of the same run under hetjax's launcher, undisturbed."""
    directory.mkdir(parents=True, exist_ok=True)
    code = "import sys, pathlib, hetjax; hetjax.join_processes(); from experiments.drills import "
    code += "engines_ray; engines_ray.work(pathlib.Path(sys.argv[1]))"
    launcher = [sys.executable, "-m", "hetjax.launch", f"--workers={len(RESOURCES)}", "--"]
    subprocess.run(
        [*launcher, sys.executable, "-c", code, str(directory)],
        cwd=fault_cases.ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=sys.stderr,
    )
    return directory / "run"


# What is done to it, and what came of it


class Disturbed:
    """Does something once, as soon as the run has done so many rounds; a context.

    Args:
        directory: of the run.
        at_round: after which it is done.
        act: does it.
    """

    def __init__(self, directory: pathlib.Path, at_round: int, act: Callable[[], Any]) -> None:
        self._directory, self._round, self._act = directory, at_round, act
        self._time = float("nan")  # monotonic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> "Disturbed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._over.wait(0.01):
            if any(told[1] >= self._round for told in self._told()):
                self._time = time.monotonic()
                self._act()
                return

    def _told(self) -> list[tuple[float, ...]]:
        """Process id, round and when it was told, of each round that process 0 has done."""
        path = self._directory / "rounds"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(float, line.split())) for line in lines if line.count(" ") == 2]

    def figures(self) -> dict[str, Any]:
        """Seconds from there to the first round of another process 0, in all and by parts."""
        told = self._told()
        first_round = next(at for pid, _, at in told if pid != told[0][0]) - self._time
        paths = sorted(self._directory.glob("about-*"))
        about = [json.loads(path.read_text()) for path in paths]
        read = max(each["read"] for each in about)
        ends = [about[0]["made"], read, about[0]["joined"], about[0]["loaded"]]
        *parts, _ = np.diff([self._time, *ends, 0.0])
        secs = dict(zip(("engine", "imports", "joining", "loading"), parts, strict=True))
        secs["compiling"] = about[0]["compiling"]
        secs["rounds"] = first_round - sum(secs.values())
        rounded = {name: round(float(part), 2) for name, part in secs.items()}
        return {"secs_to_first_new_round": round(first_round, 2), "secs": rounded}


def kill_rank(directory: pathlib.Path, rank: int) -> None:
    """Kills the process that had the number in the first attempt."""
    os.kill(int((directory / f"began-{rank}").read_text()), signal.SIGKILL)


def compared(directory: pathlib.Path, undisturbed: pathlib.Path) -> dict[str, Any]:
    """Whether the run ended as the other one did, and each example was done once an epoch."""
    run = directory / "run"
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    is_whole = [line["round"] for line in lines] == list(range(EPOCHS * ROUNDS_PER_EPOCH))
    return {
        "whole": is_whole,
        "bit_equal": is_whole and fault_cases.are_bit_equal(run, undisturbed),
        "missing": summary["examples_missing"],
        "doubled": summary["examples_duplicated"],
    }


def repetition(
    seed: int, directory: pathlib.Path, undisturbed: pathlib.Path, *, rank: int | None = None
) -> dict[str, Any]:
    """Joins, kills one rank at a random round, goes on, compares.

    Args:
        seed: draws the rank and the round.
        directory: a new one.
        undisturbed: what `reference` returned.
        rank: to kill; None: drawn.
    """
    rng = random.Random(seed)
    drawn, at_round = rng.randrange(len(RESOURCES)), rng.randint(1, _LAST_KILL)
    rank = drawn if rank is None else rank
    before = set(os.listdir("/dev/shm"))
    disturbed = Disturbed(directory, at_round, lambda: kill_rank(directory, rank))
    with session(), disturbed:
        launched(directory)
    left = [name for name in set(os.listdir("/dev/shm")) - before if "hetjax" in name]
    return {
        "engine": "ray",
        "seed": seed,
        "rank": rank,
        "round": at_round,
        **compared(directory, undisturbed),
        "left_in_memory": len(left),
        **disturbed.figures(),
    }


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A Ray of one node on this machine, with a GPU in its books alone; or that which runs."""
    os.environ.update({**TOKEN, "JAX_PLATFORMS": "cpu"})  # Ray reads the mode when it is imported
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init("local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
