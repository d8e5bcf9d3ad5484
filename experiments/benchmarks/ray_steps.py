"""Local steps over links of 100 Mb/s, beside all-reduce; and are bytes counted right?

    python -m experiments.benchmarks.ray_steps [--only=rounds,kills,bytes] [--rounds=15]
        [--steps=16] [--microbatch_secs=0.25] [--minutes=5] [--wire=float32]

Four workers at speeds 4 : 2 : 1 : 1, a model of 5.3 million parameters. Each worker is on a node of
Ray in a network namespace of its own, whose link has a token bucket at both ends. Computation is
emulated: a microbatch of the fastest worker takes `--microbatch_secs`. What the update, Ray and the
links take is real. A worker takes `--steps` in a round in the mean, by static quotas.

`rounds` is examples a second, and the share of a round beside its longest local phase; all-reduce
takes one microbatch of each worker before each update, and two in the mean. `kills` removes a node
each minute and adds one. `bytes` has two workers: what they count is compared with
what the interfaces of their namespaces have sent. It needs root.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax
from absl import flags

import hetjax
from experiments import command_line
from experiments.benchmarks import rows
from experiments.drills import ray_nodes

_ONLY = flags.DEFINE_list("only", [], "Groups; all if empty.", allow_override=True)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Of local steps, that are counted.", 5)
_STEPS = flags.DEFINE_integer("steps", 16, "Of a worker in a round, in the mean.", 1)
_SECS = flags.DEFINE_float("microbatch_secs", 0.25, "Of the fastest worker.", 0.01)
_MINUTES = flags.DEFINE_integer("minutes", 5, "Kills, one a minute.", 1)
_WIRE = flags.DEFINE_string("wire", "float32", "Of what is handed in.", allow_override=True)

_RATE, _NUMBERS = "100mbit", 5_300_000
_SPEEDS = (1.0, 0.5, 0.25, 0.25)
_SKIPPED = 3  # rounds
_MICROBATCH = 2  # examples
_LOOK_SECS = 0.2


class Kind(NamedTuple):
    """Of a run.

    Args:
        each: microbatches of a worker in a round, in the mean.
        local: a step with each; else all-reduce.
        wire: of what is handed in.
        by_speed: quotas go by speed; else all take as many.
    """

    each: int
    local: bool = True
    wire: str = "float32"
    by_speed: bool = True


def train(
    directory: pathlib.Path, kind: Kind, speeds: Sequence[float], microbatch_secs: float
) -> Any:
    """What each worker does, until there is a file `over`."""
    hetjax.use_cpu_workers(1)
    workers = len(speeds)
    x = np.random.default_rng(0).normal(size=(workers * _MICROBATCH * 1000, 16)).astype(np.float32)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return (batch["x"] @ params["w"] - batch["y"]) ** 2 + 0.0 * params["rest"].sum()

    def on_round(report: hetjax.RoundReport) -> bool:
        return (directory / "over").exists()

    optimizer, more = optax.sgd(0.01), {}
    if kind.local:
        optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        more = {"rule": hetjax.local_steps({"name": "sgd", "learning_rate": 0.01})}
    return hetjax.fit(
        loss,
        {"w": np.zeros(16, np.float32), "rest": np.zeros(_NUMBERS - 16, np.float32)},
        optimizer,
        {"x": x, "y": x.sum(-1)},
        epochs=10_000,
        microbatch_size=_MICROBATCH,
        budget=workers * kind.each,
        cluster={"secs_per_microbatch": [microbatch_secs / speed for speed in speeds]},
        quota=hetjax.quota.static(proportions=list(speeds) if kind.by_speed else [1] * workers),
        reducer=hetjax.topology.all_reduce(wire=kind.wire),
        checkpoint={"every_rounds": 0},
        workdir=directory / "run",
        callbacks=[on_round],
        progress=False,
        **more,
    )


class Watched:
    """A run, from outside.

    Args:
        directory: of it.
        nodes: of it.
    """

    def __init__(self, directory: pathlib.Path, nodes: ray_nodes.Nodes) -> None:
        self.directory, self.nodes, self.over = directory, nodes, threading.Event()

    def lines(self) -> list[dict[str, Any]]:
        """Of the rounds that are done."""
        path = self.directory / "run" / "metrics.jsonl"
        told = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in told if line.endswith("\n")]

    def wait(self, count: int) -> list[dict[str, Any]]:
        """Until so many are done, or the run is over."""
        while len(found := self.lines()) < count and not self.over.wait(_LOOK_SECS):
            pass
        return found


def run(
    kind: Kind, speeds: Sequence[float], watch: Callable[[Watched], Any]
) -> tuple[Any, hetjax.FitResult]:
    """`(what watch returns, the result)` of a run, which ends when watch does."""
    import hetjax.ray

    nodes = ray_nodes.NetworkNodes(len(speeds), rate=_RATE)
    with tempfile.TemporaryDirectory() as name:
        watched = Watched(pathlib.Path(name), nodes)
        try:
            with concurrent.futures.ThreadPoolExecutor() as threads:
                running = threads.submit(
                    hetjax.ray.launch,
                    functools.partial(train, watched.directory, kind, speeds, _SECS.value),
                    resources=[{"CPU": 1, f"node{k}": 1} for k in range(len(speeds))],
                    elastic=True,
                    max_failures=100,
                )
                running.add_done_callback(lambda _: watched.over.set())
                found = watch(watched)
                (watched.directory / "over").touch()
                return found, running.result()
        finally:
            nodes.close()


def speed(lines: Sequence[dict[str, Any]]) -> float:
    """Examples a second."""
    return sum(line["examples"] for line in lines) / sum(line["round_secs"] for line in lines)


def beside(lines: Sequence[dict[str, Any]]) -> float:
    """The median share of a round beside its longest local phase."""
    return float(np.median([1 - max(line["compute_secs"]) / line["round_secs"] for line in lines]))


def rounds() -> rows.Found:
    count, found = _ROUNDS.value, {}
    for name, kind in {
        "all-reduce, 1 each": Kind(1, local=False, by_speed=False),
        "all-reduce, 2 each": Kind(2, local=False),
        "local steps": Kind(_STEPS.value),
        "local steps, int8": Kind(_STEPS.value, wire="int8"),
    }.items():
        lines, _ = run(kind, _SPEEDS, lambda watched: watched.wait(count + _SKIPPED))
        found[name] = lines[_SKIPPED:]
        yield rows.Row(f"{name}: examples a second", "none", f"{speed(found[name]):.2f}", count)
        share = f"{beside(found[name]):.1%}"
        yield rows.Row(f"{name}: beside the longest local phase", "≤ 10%", share, count)
        for other in list(found)[:2] if kind.local else ():
            over = f"{speed(found[name]) / speed(found[other]):.2f}"
            yield rows.Row(f"{name}: over {other}", "≥ 5", over, count)
    secs = np.median([line["round_secs"] for line in found["local steps"]])
    yield (
        f"{_STEPS.value} steps in the mean; a microbatch of the fastest takes {_SECS.value} s, a "
        f"round of local steps {secs:.1f} s."
    )


def kills() -> rows.Found:
    """A node a minute, and as long without."""

    def watch(watched: Watched) -> tuple[list[dict[str, Any]], int]:
        begun = len(watched.wait(_SKIPPED))
        calm = len(watched.wait(begun + 10))
        for minute in range(_MINUTES.value):
            number = minute % len(_SPEEDS)
            watched.nodes.lose(number)
            watched.nodes.add(number)
            watched.over.wait(60)
        return watched.lines()[begun:], calm - begun

    (lines, calm), result = run(Kind(_STEPS.value, wire=_WIRE.value), _SPEEDS, watch)
    kept = speed(lines[calm:]) / speed(lines[:calm])
    summary, n = result.summary, _MINUTES.value
    lost = f"{summary['examples_missing']}, {summary['examples_duplicated']}"
    yield rows.Row("kills: examples missing, done twice", "0, 0", lost, n)
    yield rows.Row("kills: of the examples a second kept", "≥ 90%", f"{kept:.1%}", n)


def interface_bytes(count: int) -> int:
    """That so many nodes have sent over their links."""
    told = json.loads(subprocess.check_output(["ip", "-s", "-j", "link"]))
    received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in told}
    return sum(received[f"node{number}"] for number in range(count))  # at the bridge's end


def counted() -> rows.Found:
    for kind in (Kind(2, local=False), Kind(4), Kind(4, wire="int8")):

        def watch(watched: Watched) -> tuple[list[dict[str, Any]], int]:
            begun, before = len(watched.wait(_SKIPPED)), interface_bytes(2)
            ended, after = len(watched.wait(begun + 10)), interface_bytes(2)
            return watched.lines()[begun:ended], after - before

        (lines, seen), _ = run(kind, _SPEEDS[:2], watch)
        told = sum(line["bytes_sent"] for line in lines)
        name = f"bytes, {kind.wire}, {kind.each if kind.local else 'no'} local steps"
        share = f"{told / seen:.3f}"
        yield rows.Row(f"{name}: counted over sent", "1 within 5%", share, len(lines))
        yield f"{name}: {told / len(lines) / 1e6:.1f} MB a round."


GROUPS = {"rounds": rounds, "kills": kills, "bytes": counted}


def of(group: str) -> list[rows.Row | str]:
    return list(GROUPS[group]())


def main() -> None:
    os.environ.update(ray_nodes.VARIABLES)
    groups = {name: functools.partial(ray_nodes.isolated, of, name) for name in GROUPS}
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
