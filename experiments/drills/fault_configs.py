"""Mutated configurations: what a user may write, by intent or by mistake, and what comes of it.

Each is a tiny problem with one to four fields changed, singly or in pairs that depend on each
other. A configuration has to run, or to be refused by one clear message; anything else that
Python can raise, and a run that does not end, is a fault of hetjax.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st

from experiments.drills import fault_cases
from hetjax import gates, ordering, quota, topology
from hetjax.config import fields
from hetjax.zoo import config as config_lib

LIMIT_SECS = 300
BASE: dict[str, Any] = {
    "epochs": 1,
    "microbatch_size": 4,
    "budget": 5,
    "local": "virtual",
    "data": {"num_train": 30},
    "model": {"name": "logistic"},
    "cluster": {
        "num_workers": 3,
        "secs_per_microbatch": [0.001, 0.002, 0.003],
        "clock": "virtual",
    },
}
# What a field may well hold; DIR is a directory of the drill. Large numbers stand only where
# they cost nothing: a billion epochs are no mistake that anybody could tell.
PLAUSIBLE: dict[str, list[Any]] = {
    "seed": [0, 1, 2**31 - 1],
    "epochs": [1, 2],
    "microbatch_size": [2, 4, 6, 64],
    "budget": [1, 2, 3, 5, 8, 100],
    "eval_every": [1, 2, 2**31 - 1],
    "local": ["stepped", "fused", "virtual"],
    "replay": ["", "DIR/run/metrics.jsonl", "DIR/missing.jsonl", "DIR", "DIR/base.json"],
    "nonfinite": ["stop", "skip"],
    "data.name": ["digits", "digits/8x8", "nowhere", "../digits", "cifar10"],
    "data.dir": ["", "DIR/data", "/dev/null", "/proc/none"],
    "data.feed": ["resident", "streamed"],
    "data.sharing": ["shared", "private"],
    "data.weighting": ["shard", "example", "shard_mean"],
    "data.num_train": [1, 2, 3, 7, 30, 31, 99999],
    "model.name": ["logistic", "mlp", "small_cnn", "lenet"],
    "model.hidden": [[], [1], [4, 3], 5],
    "optimizer.name": ["sgd", "adam", "adamw"],
    "optimizer.learning_rate": [1e-30, 0.01, 1, 1e30, 1e308],
    "optimizer.momentum": [0, 0.5, 0.999999],
    "optimizer.nesterov": [False, True],
    "optimizer.weight_decay": [0, 0.1, 1e30],
    "optimizer.clip_norm": [0, 1e-30, 1.0, 1e300],
    "optimizer.schedule": ["constant", "cosine", "linear", "step"],
    "optimizer.warmup_epochs": [0, 0.5, 1, 2],
    "optimizer.decay_every_epochs": [0, 1e-9, 0.5, 1e9],
    "optimizer.decay_factor": [1e-30, 0.5, 1],
    "quota.policy": list(quota.POLICIES),
    "quota.proportions": [[], [1, 2, 3], [0, 0, 1], [1e-300, 1, 1e300], [0, 0, 0]],
    "quota.max_microbatches": [0, 1, 2, 5, 2**31 - 1],
    "quota.period_rounds": [0, 1, 2, 2**31 - 1],
    "quota.band": [0, 0.2, 0.999],
    "quota.gain": [1e-9, 0.5, 1, 1e30],
    "quota.settle_rounds": [0, 1, 50, 2**31 - 1],
    "quota.min_gain": [0, 0.01, 1e30],
    "quota.confidence": [0, 2, 1e30],
    "quota.noise_weight": [0, 1, 1e30],
    "quota.probe_microbatches": [1, 2, 2**31 - 1],
    "quota.drift": [0, 0.5, 1e30],
    "quota.alarm": [0, 12, 1e30],
    "quota.guard": [False, True],
    "quota.arguments": [{}, {"least": 2}],
    "ordering.method": list(ordering.ORDERINGS),
    "ordering.block_pairs": [1, 2, 16, 1000],
    "ordering.block_size": [0, 1, 3, 1000],
    "ordering.freeze_after": [0, 1, 2],
    "ordering.random_scale": [1e-9, 0.3, 1e30],
    "reducer.name": list(topology.REDUCERS),
    "reducer.graph": [
        *topology.GRAPHS,
        "0-1,1-2",
        "0-1,0-1,1-2,2-0",
        "0-1",
        "0-0",
        "0-9",
        "x",
        "1-",
    ],
    "reducer.degree": [2, 3, 4, 2**31 - 1],
    "reducer.graph_seed": [0, 5],
    "reducer.budget": [1e-9, 0.3, 0.5, 1],
    "gate.trigger": list(gates.GATES),
    "gate.quorum": [0, 1, 3, 5, 2**31 - 1],
    "gate.deadline_secs": [0, 1e-9, 0.001, 0.004, 1e9],
    "gate.in_flight": ["finish", "drop"],
    "cluster.num_workers": [1, 2, 3, 4, 8, 9, 64],
    "cluster.secs_per_microbatch": [[], [0.001], [0.001, 0.002, 0.003], [1e-300, 0.01, 0.1]],
    "cluster.overhead_secs": [0, 0.001, [0, 0.001, 0.002], [0.001]],
    "cluster.delay": ["constant", "exponential", "gamma", "shifted_exponential"],
    "cluster.delay_cv": [1e-3, 0.5, 10],
    "cluster.delay_per": ["microbatch", "round"],
    "cluster.changes": [
        [],
        [{"round": 1, "worker": 0, "secs_per_microbatch": 0.01}],
        [{"round": 1, "worker": 2, "present": False}],
        [{"round": 0, "worker": 0, "present": False}, {"round": 1, "worker": 0, "present": True}],
        [{"round": 1, "worker": w, "present": False} for w in range(3)],
        [{"round": 2**31 - 1, "worker": 1, "overhead_secs": 1.0}],
        [{"round": 1, "worker": 63, "present": False}],
        [{"round": 1}],
    ],
    "cluster.clock": ["wall", "virtual"],
    "cluster.seed": [-1, 0, 7],
    "checkpoint.every_secs": [0, 1e-9, 60],
    "checkpoint.every_rounds": [0, 1, 2],
    "checkpoint.keep": [1, 2, 2**31 - 1],
}
WILD: list[Any] = [None, True, False, -1, 0, 1, 3, 0.5, -0.5, math.nan, math.inf, -math.inf]
WILD += [10**400, 2**31, 1e-320, "", " ", "x", "nan", "-1", "none", "é\n\0", "../..", b"x"]
WILD += [[], ["a"], [None], [1, 2, 3], (1, math.nan), [[1]], {}, {"a": 1}, {"": {}}, {1: 2}]
WILD += [np.float32(2), np.arange(3), {"name": "digits"}, [{"round": 1, "worker": 0}], set(), 1j]
TYPOS = ["epoch", "quota", "data", "cluster.num_worker", "gate", "optimiser.name", "", "."]
_FIELDS = sorted(PLAUSIBLE)


class Outcome(NamedTuple):
    kind: str  # ran, refused; and the faults: unclear, inexact, failed, hung
    message: str = ""
    secs: float = 0.0


def for_each(
    use: Callable[[dict[str, Any]], None], count: int, *, directory: pathlib.Path, seed: int
) -> None:
    """Calls `use` with about `count` different mutations, made from the seed."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(mutations(directory=directory))
    def each(changes: dict[str, Any]) -> None:
        use(changes)

    each()


@st.composite
def mutations(draw: st.DrawFn, *, directory: pathlib.Path) -> dict[str, Any]:
    """Changes by dotted name: a third of them made to fit, and half with a wild value."""
    # By its own choices hypothesis tries the simplest values, and near them, far too often.
    rng = draw(st.randoms(use_true_random=True))
    names = rng.sample(_FIELDS, rng.choice([1, 2, 2, 3, 4]))
    changes = {name: rng.choice(PLAUSIBLE[name]) for name in names}
    manner = rng.choice(["fitted"] * 4 + ["loose"] * 2 + ["wild"] * 5)
    if manner == "wild":
        name = rng.choice([*_FIELDS, *TYPOS])
        changes = {k: v for k, v in changes.items() if not (name and k.startswith(f"{name}."))}
        changes[name] = rng.choice(WILD)
    elif manner == "fitted":
        changes = fitted(changes)
    return {name: _placed(value, directory) for name, value in changes.items()}


def fitted(changes: dict[str, Any]) -> dict[str, Any]:
    """The same with lists as long as there are workers, and what a chosen part needs."""
    changes = dict(changes)
    num_workers = changes.get("cluster.num_workers", BASE["cluster"]["num_workers"])
    for name, default in (
        ("cluster.secs_per_microbatch", BASE["cluster"]["secs_per_microbatch"]),
        ("cluster.overhead_secs", None),
        ("quota.proportions", [3, 2, 1] if changes.get("quota.policy") == "static" else None),
    ):
        values = changes.get(name) or default
        if isinstance(values, list):
            changes[name] = [values[i % len(values)] for i in range(num_workers)]
    if changes.get("gate.trigger") == "quorum":
        changes["gate.quorum"] = min(changes.get("gate.quorum") or 2, changes.get("budget", 5))
    if changes.get("gate.trigger") == "deadline":
        changes["gate.deadline_secs"] = changes.get("gate.deadline_secs") or 0.01
    if changes.get("optimizer.schedule") == "step":
        changes["optimizer.decay_every_epochs"] = 0.5
    if changes.get("data.weighting", "shard") != "shard":
        changes["data.sharing"] = "private"
    return changes


def _placed(value: Any, directory: pathlib.Path) -> Any:
    return value.replace("DIR", str(directory)) if isinstance(value, str) else value


def prepare(directory: pathlib.Path) -> None:
    """Makes the files that mutated configurations name."""
    (directory / "base.json").write_text(json.dumps(BASE))
    outcome = run({}, directory)
    if outcome.kind != "ran":
        raise RuntimeError(f"the configuration without changes does not run: {outcome.message}")


def run(changes: dict[str, Any], directory: pathlib.Path, *, is_kept: bool = True) -> Outcome:
    """Trains in this process, at most `LIMIT_SECS`; with the workdir `run` where it is kept."""
    from experiments import train

    began = time.perf_counter()
    kind, message = "ran", ""
    try:
        quiet = contextlib.redirect_stderr(io.StringIO())
        with _limited(LIMIT_SECS), quiet, contextlib.chdir(directory):
            given = fault_cases.nested(changes, BASE)
            config = config_lib.validate(given)
            result = train.train_and_evaluate(
                config, str(directory / "run") if is_kept else None, progress=False
            )
        summary = result.summary
        if summary["examples_missing"] or summary["examples_duplicated"]:
            kind, message = "inexact", json.dumps(summary)
    except ValueError as error:
        message = str(error)
        kind = "refused" if is_clear(message) else "unclear"
    except _TooLong:
        kind, message = "hung", traceback.format_exc()
    except Exception:
        kind, message = "failed", traceback.format_exc()
    return Outcome(kind, message, time.perf_counter() - began)


def run_command(changes: dict[str, Any], directory: pathlib.Path, *, by_file: bool) -> Outcome:
    """Trains by the whole command, with the changes in a JSON file or as flags."""
    path, flags = directory / "config.json", []
    if by_file:
        path.write_text(json.dumps(fault_cases.nested(changes, BASE), default=str))
    else:
        path.write_text(json.dumps(BASE))
        flags = [f"--config.{name}={_as_text(value)}" for name, value in changes.items()]
    command = [sys.executable, "-m", "experiments.train", f"--config={path}"]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, f"--workdir={directory / 'run'}", *flags],
            cwd=directory,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fault_cases.ROOT)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECS,
        )
    except subprocess.TimeoutExpired:
        return Outcome("hung", "", time.perf_counter() - began)
    secs, said = time.perf_counter() - began, done.stderr
    if done.returncode not in (0, 2) or "Traceback" in said:
        return Outcome("failed", f"exit code {done.returncode}\n{said}", secs)
    if done.returncode == 0:
        return Outcome("ran", said, secs)
    return Outcome("refused" if is_clear(said) else "unclear", said, secs)


def is_clear(message: str) -> bool:
    """Whether a message is short, and names a field of the configuration or of the command."""
    names = fields.leaf_names(config_lib.ExperimentConfig)
    words = {part for name in names for part in (name, name.split(".")[-1], name.split(".")[0])}
    found = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message))
    return bool(found & (words | {"configuration", "data_dir"})) and len(message) < 4000


def _as_text(value: Any) -> str:
    """As somebody would write it on the command line; no argument can hold a NUL."""
    return (value if isinstance(value, str) else repr(value)).replace("\0", "")


class _TooLong(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


@contextlib.contextmanager
def _limited(secs: int) -> Iterator[None]:
    """Ends what takes longer; seconds in which this process was stopped do not count."""
    is_done = threading.Event()

    def end(signum: int, frame: object) -> None:
        raise _TooLong

    def watch() -> None:
        for _ in range(secs):
            if is_done.wait(1.0):
                return
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, end)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
        signal.signal(signal.SIGALRM, before)


def forget_programs() -> None:
    """Frees what JAX has compiled for the runs before."""
    jax.clear_caches()
