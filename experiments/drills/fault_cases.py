"""The runs that `faults` disturbs: gangs of a small problem, told and watched line by line.

As a program it is `experiments.train`, in which each process tells where it is

    HETJAX_DRILL_FAULT=callback:1:7 python -m hetjax.launch --workers=2 -- \
        python -m experiments.drills.fault_cases --config=FILE --workdir=DIR

and in which one process may have a fault: at round 7 of the first attempt process 1 sleeps
without end in a callback, or in the `loader`, the source of its data.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
FAULT_VARIABLE = "HETJAX_DRILL_FAULT"
NUM_EXAMPLES, ROUNDS_PER_EPOCH = 203, 4
_PATIENCE_SECS = 120.0
_SECS_PER_MICROBATCH = (0.004, 0.006, 0.008, 0.012)

VARIANTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (3, {"ordering.method": "d_grab", "gate.trigger": "first"}),
    (
        4,
        {
            "ordering.method": "pair_balance",
            "reducer.name": "d_psgd",
            "gate.trigger": "quorum",
            "gate.quorum": 5,
        },
    ),
    (2, {"ordering.method": "grab", "reducer.name": "ring", "data.feed": "streamed"}),
    (
        3,
        {
            "ordering.method": "shuffle_once",
            "reducer.name": "matcha",
            "gate.trigger": "deadline",
            "gate.deadline_secs": 0.015,
        },
    ),
    (4, {"ordering.method": "frozen", "data.sharing": "private"}),
)
"""Processes, and what differs from the defaults: every kind of part is in one of them."""


def nested(dotted: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`nested({"gate.trigger": "first"})` is `{"gate": {"trigger": "first"}}`, over `base`."""
    result = copy.deepcopy(dict(base or {}))
    for name, value in dotted.items():
        *groups, last = name.split(".")
        inner = result
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return result


def gang_config(num_workers: int, rounds: int, differences: Mapping[str, Any]) -> dict[str, Any]:
    """About `rounds` rounds of some 20 ms, with adaptive quotas, and a checkpoint every third."""
    fields = {
        "epochs": max(1, round(rounds / ROUNDS_PER_EPOCH)),
        "microbatch_size": 8,
        "budget": 8,
        "data.num_train": NUM_EXAMPLES,
        "model.name": "logistic",
        "cluster.num_workers": num_workers,
        "cluster.secs_per_microbatch": list(_SECS_PER_MICROBATCH[:num_workers]),
        "checkpoint.every_rounds": 3,
        "checkpoint.every_secs": 0,
    }
    return nested({**fields, **differences})


# The program of a worker


def _tell(what: str, *numbers: int) -> None:
    print("drill:", what, *numbers, flush=True)


def _hang() -> None:
    _tell("hangs")
    while True:
        time.sleep(60)


class _Loader:
    """A source that does not answer any more once it is dead."""

    def __init__(self, source: Any) -> None:
        self._source, self.is_dead = source, False

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        if self.is_dead:
            _hang()
        return self._source[index]


def _telling(fit: Callable[..., Any]) -> Callable[..., Any]:
    """`hetjax.fit` that tells each round, and has the fault that the environment asks for."""
    kind, process, at_round = os.environ.get(FAULT_VARIABLE, ":-1:-1").split(":")
    attempt = int(os.environ.get("HETJAX_ATTEMPT", "0"))
    is_faulty = attempt == 0 and process == os.environ.get("HETJAX_PROCESS_ID")

    @functools.wraps(fit)
    def telling(loss_fn: Any, params: Any, optimizer: Any, source: Any, **options: Any) -> Any:
        loader = _Loader(source)

        def on_round(line: Any) -> None:
            _tell("round", line.round)
            if is_faulty and line.round >= int(at_round):
                if kind == "callback":
                    _hang()
                loader.is_dead = True

        if is_faulty and kind == "loader":
            source = loader
        result = fit(loss_fn, params, optimizer, source, callbacks=[on_round], **options)
        _tell("ended", result.history[-1]["round"] if result.history else -1)
        return result

    _tell("pid", os.getpid(), attempt)
    return telling


def main(argv: list[str]) -> None:
    """`experiments.train`, told."""
    import hetjax
    from experiments import train

    hetjax.fit = _telling(hetjax.fit)
    train.main(argv)


# The gang of workers, from outside


@dataclasses.dataclass
class _Told:
    """What the workers of one attempt have told, by worker."""

    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    rounds: dict[int, int] = dataclasses.field(default_factory=dict)
    ended: dict[int, int] = dataclasses.field(default_factory=dict)
    hung: dict[int, float] = dataclasses.field(default_factory=dict)  # monotonic seconds
    first_round: int = -1
    first_secs: float = np.inf  # monotonic, of the first round that process 0 told
    rounds_told: int = 0


class Gang:
    """A launcher with its workers, as a context that ends them.

    Args:
        directory: gets the workdir `run`, the configuration, and the temporary files.
        config: of the run, nested.
        flags: of the launcher.
        fault: for `FAULT_VARIABLE`.
        cache: directory of compiled programs.
        program: the module that each worker runs.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: Mapping[str, Any],
        *flags: str,
        fault: str = "",
        cache: pathlib.Path,
        program: str = "experiments.drills.fault_cases",
    ) -> None:
        self.workdir, self.num_workers = directory / "run", config["cluster"]["num_workers"]
        self._temporary = directory / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        path = directory / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", program]
        command += [f"--config={path}", f"--workdir={self.workdir}"]
        launcher = [sys.executable, "-m", "hetjax.launch", f"--workers={self.num_workers}"]
        self._process = subprocess.Popen(
            [*launcher, *flags, "--", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **environment(cache), "TMPDIR": str(self._temporary)}
            | ({FAULT_VARIABLE: fault} if fault else {}),
        )
        self.lines: list[tuple[float, str]] = []  # monotonic seconds
        self.attempts: list[_Told] = []
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()  # its guardian ends the workers
        self._process.wait()
        self._thread.join()

    @property
    def now(self) -> _Told:
        """The attempt that runs."""
        return self.attempts[-1] if self.attempts else _Told()

    @property
    def text(self) -> str:
        """All that was printed, without what the workers told the drill."""
        return "\n".join(line for _, line in list(self.lines) if "] drill: " not in line)

    @property
    def restarts(self) -> int:
        return self.text.count("; restart ")

    @property
    def is_over(self) -> bool:
        return self._over

    def send(self, signum: int, pid: int | None = None) -> float:
        """Sends a signal to a process, or to the launcher; the time. 0 where there is none."""
        sent = time.monotonic()
        try:
            os.kill(self._process.pid if pid is None else pid, signum)
        except ProcessLookupError:
            return 0.0
        return sent

    def wait(self, condition: Callable[[], object], secs: float = _PATIENCE_SECS) -> bool:
        """Waits until the condition holds or all is over; whether it holds."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or condition(), secs)
            return bool(condition())

    def time_of(self, pattern: str) -> tuple[float, str]:
        """The first line that has the pattern, and when it came; infinity and "" for none."""
        found = ((at, line) for at, line in list(self.lines) if re.search(pattern, line))
        return next(found, (np.inf, ""))

    def end(self, secs: float = _PATIENCE_SECS) -> int | None:
        """The launcher's exit code; None where it had to be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=secs)
        self._process.send_signal(signal.SIGKILL)
        return None

    def _collect(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with self._changed:
                    self.lines.append((time.monotonic(), line.rstrip("\n")))
                    self._take(line)
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, line: str) -> None:
        found = re.match(r"\[(\d+)\] drill: (\w+)((?: -?\d+)*)", line)
        if not found:
            return
        worker, numbers = int(found[1]), [int(number) for number in found[3].split()]
        if found[2] == "pid":
            while len(self.attempts) <= numbers[1]:
                self.attempts.append(_Told())
            self.now.pids[worker] = numbers[0]
        elif found[2] == "round":
            self.now.rounds[worker] = numbers[0]
            if worker == 0:
                self.now.rounds_told += 1
                if self.now.rounds_told == 1:
                    self.now.first_round, self.now.first_secs = numbers[0], time.monotonic()
        elif found[2] == "ended":
            self.now.ended[worker] = numbers[0]
        else:
            self.now.hung[worker] = time.monotonic()


def environment(cache: pathlib.Path) -> dict[str, str]:
    """That makes JAX keep every compiled program."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@contextlib.contextmanager
def keeping_programs(cache: pathlib.Path) -> Iterator[None]:
    """The same for this process, for as long as the context lasts."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(cache), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# What a run left behind


def is_whole(workdir: pathlib.Path) -> bool:
    """Whether the files say that each round was done once, and as many examples as there are.

    With private data the last round may go beyond the end of the last epoch.
    """
    summary = json.loads((workdir / "summary.json").read_text())
    config = json.loads((workdir / "config.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    end = config["epochs"] * config["data"]["num_train"]
    processed = sum(line["examples"] for line in lines)
    most = end if config["data"]["sharing"] == "shared" else end + lines[-1]["examples"]
    return (
        not summary["interrupted"]
        and summary["rounds"] == len(lines)
        and [line["round"] for line in lines] == list(range(len(lines)))
        and lines[-1]["examples_processed"] == processed
        and end <= processed <= most
    )


def are_bit_equal(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Whether two runs ended with the same parameters, orders and ledger, to the bit.

    All of the last checkpoints is compared but what the policy of the quotas learnt from clocks.
    """
    from hetjax.checkpoints import checkpoint
    from hetjax.rounds import resume

    saved = [checkpoint.newest(path / resume.DIRECTORY) for path in (first, second)]
    if any(one is None for one in saved):
        return False
    arrays = [
        {name: array for name, array in one.arrays.items() if not name.startswith("run/policies/")}
        for one in saved
        if one is not None
    ]
    return arrays[0].keys() == arrays[1].keys() and all(
        array.dtype == arrays[1][name].dtype and array.tobytes() == arrays[1][name].tobytes()
        for name, array in arrays[0].items()
    )


if __name__ == "__main__":
    from experiments import command_line, config_flag
    from experiments import train as _defines_its_flags  # noqa: F401

    command_line.run(main, config_flag.parse_flags, takes_arguments=True)
