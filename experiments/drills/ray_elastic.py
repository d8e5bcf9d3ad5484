"""Do workers of an elastic run over Ray come and go, and is nothing lost? Disturbs, and judges.

    python -m experiments.drills.ray_elastic [--only=processes,nodes,silent,cut,head,driver,
        referee,replaced] [--count=20] [--every=5] [--numbers=62006] [--microbatch_secs=0.01]

Four workers, each on a node of its own: raylets on this machine, whose health is looked at every
half second. `processes` kills a worker's process, `nodes` a raylet, and adds a node. `silent` stops
all processes of two nodes, of which one writes a checkpoint, and lets them go on after 30 s. `cut`
cuts off two such nodes, each in a network namespace, for as long; it needs root. The run says by
its ledger what is missing or done twice, and by digests in each round that all states are equal.
`ray_decisions` reads what each process took for decided. A commit is seen when the callbacks of its
round are called, which is in the next round.

`head`, `driver` and `referee` are killed with `kill -9`, and the same call is made again
(`ray_ends`). `replaced` removes the node of a slow worker and adds faster ones; the rounds from
the 20th on are compared with the shortest in which those workers can compute as much, by their
speeds and without any other cost of a round. Its microbatches take 25 times as long.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import optax
from absl import flags

import hetjax
from experiments import command_line
from experiments.benchmarks import rows
from experiments.drills import ray_decisions, ray_ends, ray_nodes
from hetjax import quota

_ONLY = flags.DEFINE_list("only", [], "What is disturbed; all if empty.", allow_override=True)
_COUNT = flags.DEFINE_integer("count", 20, "How often.", 0, allow_override=True)
_EVERY = flags.DEFINE_float("every", 5.0, "Seconds between two of them.", 0.1, allow_override=True)
_NUMBERS = flags.DEFINE_integer("numbers", 62_006, "Of a model.", 17, allow_override=True)
_MICROBATCH_SECS = flags.DEFINE_float(
    "microbatch_secs", 0.01, "Of the fastest worker.", 0.0, allow_override=True
)

SILENT = ("silent", "cut")
WHAT = ("processes", "nodes", *SILENT)
SPEEDS = (1.0, 0.5, 0.25, 0.25)
_BUDGET, _ROUNDS_PER_EPOCH = 16, 20
_SILENT_SECS = 30.0
_CHECKPOINT_SECS = 20.0  # until the next one begins
_START_SECS = 60.0
_MORE_SECS = MappingProxyType({"processes": 0.0, "nodes": 8.0, "silent": 25.0, "cut": 25.0})
"""Of one, beside `--every`; two nodes are silent at a time."""
_MOST_ROUND_SECS = 1.0


def train(
    directory: pathlib.Path,
    numbers: int,
    microbatch_secs: float,
    speeds: Sequence[float] = SPEEDS,
    **fields: Any,
) -> Any:
    """What each worker does, until there is a file `over`."""
    hetjax.use_cpu_workers(1)
    ray_decisions.record(directory)
    own, told = os.getpid(), directory / "processes"
    with told.open("a") as file:
        print(own, file=file)
    x = np.random.default_rng(0).normal(size=(2 * _BUDGET * _ROUNDS_PER_EPOCH, 16))
    x = x.astype(np.float32)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return (batch["x"] @ params["w"] - batch["y"]) ** 2 + 0.0 * params["rest"].sum()

    def on_round(report: hetjax.RoundReport) -> bool:
        with (directory / "rounds").open("a") as file:
            print(report.round, own, time.time(), file=file)
        return (directory / "over").exists()

    result = hetjax.fit(
        loss,
        {"w": np.zeros(16, np.float32), "rest": np.zeros(numbers - 16, np.float32)},
        optax.sgd(0.01),
        {"x": x, "y": x.sum(-1)},
        epochs=10_000,
        microbatch_size=2,
        budget=_BUDGET,
        cluster={"secs_per_microbatch": [microbatch_secs / speed for speed in speeds]},
        workdir=directory / "run",
        callbacks=[on_round],
        progress=False,
        **{
            "quota": hetjax.quota.static(proportions=list(speeds)),
            "checkpoint": {"every_rounds": 50},
        }
        | fields,
    )
    (directory / f"params.{own}").write_bytes(np.asarray(result.params["w"]).tobytes())
    return result


class Disturber:
    """Disturbs a run, so often, then has it end.

    Args:
        what: is disturbed.
        directory: of the run.
        nodes: of it.
    """

    def __init__(self, what: str, directory: pathlib.Path, nodes: ray_nodes.Nodes) -> None:
        self._what, self._directory, self._nodes = what, directory, nodes
        self.times: list[float] = []
        self.written: dict[int, int] = {}  # checkpoints that were seen, and by whom
        self.in_checkpoint = 0  # nodes that were silent when their leader wrote one
        self.by_themselves: list[bool] = []  # whether those that woke have ended
        self.over = threading.Event()
        self._random = random.Random(0)

    def disturb(self) -> None:
        """Until it is enough, or the run is over."""
        while not (self._directory / "rounds").exists() and not self.over.wait(0.1):
            pass
        while len(self.times) < _COUNT.value and not self.over.wait(_EVERY.value):
            living = ray_ends.trainers(self._directory)
            if self._what in SILENT:
                if len(ray_decisions.decisions(self._directory)[-1].members) == len(SPEEDS):
                    self._silence(living)
            elif len(living) > 1:  # or all that have the state die
                self._disturb(living)
        self.over.wait(_EVERY.value)
        (self._directory / "over").touch()

    def _disturb(self, living: list[int]) -> None:
        if self._what == "processes":
            os.kill(self._random.choice(living), signal.SIGKILL)
            self.times.append(time.time())
            return
        number = self._random.randrange(len(SPEEDS))
        self._nodes.lose(number)
        self.times.append(time.time())
        self._nodes.add(number)

    def _silence(self, living: list[int]) -> None:
        """Of the leader's node, in a checkpoint, and of another; both come back."""
        leader = int((self._directory / "rounds").read_text().split()[-2])
        of = {pid: self._nodes.of(pid) for pid in living}
        if leader not in of:
            return
        others = sorted({*of.values()} - {of[leader]})
        numbers = [of[leader], self._random.choice(others)]
        ends = time.monotonic() + _CHECKPOINT_SECS
        while not ray_decisions.partial(self._directory) and time.monotonic() < ends:
            time.sleep(0.001)
        is_writing = ray_decisions.partial(self._directory)  # who is cut off writes to its end
        for number in numbers:
            self._nodes.silence(number)
            self.times.append(time.time())
        time.sleep(0.1)
        stays = self._what == "cut" or ray_decisions.partial(self._directory)
        self.in_checkpoint += is_writing and stays
        self.over.wait(_SILENT_SECS)
        self.written |= ray_decisions.writers(self._directory)
        for number in numbers:
            self._nodes.wake(number)
        silent = [pid for pid in living if of[pid] in numbers]
        with contextlib.suppress(SystemExit):
            ray_ends.wait(lambda: not any(map(ray_ends.parent, silent)), "end", _SILENT_SECS)
        self.by_themselves += [not ray_ends.parent(pid) for pid in silent]
        self.written |= ray_decisions.writers(self._directory)
        for number in numbers:
            self._nodes.lose(number)
            self._nodes.add(number)


def disturbed(what: str) -> rows.Found:
    """A run that is disturbed, judged."""
    secs = _START_SECS + _COUNT.value * (_EVERY.value + _MORE_SECS[what])
    print(f"{what}: {_COUNT.value} take about {secs:.0f} s", file=sys.stderr, flush=True)
    if what == "cut":
        return ray_nodes.isolated(_disturbed, what)
    return _disturbed(what)


def _disturbed(what: str) -> list[rows.Row | str]:
    import hetjax.ray

    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        nodes = ray_nodes.NetworkNodes() if what == "cut" else ray_nodes.Nodes()
        fields = {"checkpoint": {"every_rounds": 10}} if what in SILENT else {}
        try:
            disturber = Disturber(what, directory, nodes)
            function = functools.partial(
                train, directory, _NUMBERS.value, _MICROBATCH_SECS.value, **fields
            )
            with (
                concurrent.futures.ThreadPoolExecutor() as threads
            ):  # Ray adds nodes in the main one
                running = threads.submit(
                    hetjax.ray.launch,
                    function,
                    resources=[{"CPU": 1, f"node{k}": 1} for k in range(len(SPEEDS))],
                    elastic=True,
                    max_failures=10 * _COUNT.value,
                )
                running.add_done_callback(lambda _: disturber.over.set())
                disturber.disturb()
                result = running.result()
        finally:
            nodes.close()
        return list(judged(what, directory, result.summary, disturber))


def judged(
    what: str, directory: pathlib.Path, summary: dict[str, Any], disturber: Disturber
) -> rows.Found:
    """The rows of a run."""
    times = disturber.times
    told = [line.split() for line in (directory / "rounds").read_text().splitlines()]
    commits = sorted(float(at) for *_, at in told)
    waits = sorted(min((at for at in commits if at > t), default=np.inf) - t for t in times)
    lost = (summary["examples_missing"], summary["examples_duplicated"])
    states = len({path.read_bytes() for path in directory.glob("params.*")})
    within = waits[int(0.95 * (len(waits) - 1))]
    n, most = len(times), 1.0 if what == "processes" else 3.0
    yield rows.Row(f"{what}: examples missing, done twice", "0, 0", f"{lost[0]}, {lost[1]}", n)
    yield rows.Row(f"{what}: states at the end", "1", str(states), n)
    two, of_gone = ray_decisions.read_twice(directory)
    yield rows.Row(f"{what}: rounds that two decided otherwise", "0", str(two), n)
    yield rows.Row(f"{what}: rounds with a part of the gone", "0", str(of_gone), n)
    if what in SILENT:
        written = disturber.written | ray_decisions.writers(directory)
        others = str(ray_decisions.foreign(directory, written))
        yield rows.Row(f"{what}: checkpoints by who led no more", "0", others, len(written))
        yield rows.Row(f"{what}: in a checkpoint", "some", str(disturber.in_checkpoint), n)
        ended = rows.share(disturber.by_themselves)
        yield rows.Row(f"{what}: ended by themselves when they woke", f"all of {n}", ended, n)
    yield rows.Row(f"{what}: to the next commit, 95 %", f"<= {most:g} s", f"{within:.2f} s", n)
    yield rows.Row(f"{what}: to the next commit", "none", rows.most(waits, ".2f", " s"), n)
    round_secs = statistics.median(np.diff(commits))
    yield f"{summary['rounds']} rounds, {1e3 * round_secs:.0f} ms in the median."


def launched(
    directory: pathlib.Path,
    speeds: Sequence[float] = SPEEDS,
    *,
    microbatch_secs: float = 0.01,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """A run with a seat on each of `Nodes`; `fields` are those of `fit`."""
    import hetjax.ray

    return hetjax.ray.launch(
        functools.partial(train, directory, 62_006, microbatch_secs, speeds, **fields),
        resources=[{"CPU": 1, f"node{k}": 1} for k in range(len(speeds))],
        elastic=True,
        **options,
    )


CALL = (
    "import pathlib, sys; from experiments.drills import ray_elastic;"
    "ray_elastic.launched(pathlib.Path(sys.argv[1]))"
)


def ended(what: str) -> rows.Found:
    """Runs that lose what they cannot go on without, and are called again."""
    found: list[ray_ends.Outcome] = []
    for _ in range(_COUNT.value):
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            there: list[ray_nodes.Nodes] = []

            def nodes(
                there: list[ray_nodes.Nodes] = there, stack: contextlib.ExitStack = stack
            ) -> ray_nodes.Nodes:
                if not there or what == "head":
                    for old in there:
                        old.close()
                    there[:] = [ray_nodes.Nodes(connects=False)]
                return there[0]

            stack.callback(lambda there=there: [each.close() for each in there])
            found.append(ray_ends.ended(what, pathlib.Path(name), CALL, nodes(), nodes))
    n = len(found)
    secs = rows.most([each.secs for each in found], ".1f", " s")
    named, workers = sum(len(each.said) for each in found), sum(each.workers for each in found)
    lost = [
        sum(each.summary[f"examples_{name}"] for each in found)
        for name in ("missing", "duplicated")
    ]
    again = ", ".join(str(each.lost_rounds) for each in found)
    yield rows.Row(f"{what}: until no process is left", "<= 60 s", secs, n)
    yield rows.Row(f"{what}: workers that say what they lost", str(workers), str(named), n)
    yield rows.Row(f"{what}: examples missing, done twice", "0, 0", f"{lost[0]}, {lost[1]}", n)
    yield rows.Row(f"{what}: rounds done again by the same call", "<= 50", again, n)


def replaced() -> rows.Found:
    """A slow seat's node is removed and a fast one comes, and then another; against the optimum."""
    speeds, secs = (1.0, 0.5, 0.25, 0.75, 0.5), 25 * _MICROBATCH_SECS.value
    settled, compared = 20, 60  # rounds after a change
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory, nodes = pathlib.Path(name), ray_nodes.Nodes(3, connects=False)
        stack.callback(nodes.close)
        code = (
            "import pathlib, sys; from experiments.drills import ray_elastic;"
            f"ray_elastic.launched(pathlib.Path(sys.argv[1]), {speeds}, start_secs=15.0, "
            f"fields={{'quota': 'adaptive'}}, microbatch_secs={secs})"
        )
        driver = ray_ends.Program(code, directory, nodes.address)
        lines: list[dict[str, Any]] = []
        for what, numbers in (("replaced", (0, 1, 3)), ("added", (0, 1, 3, 4))):
            driver.wait_for_rounds(directory, len(lines) + 5)
            if what == "replaced":
                nodes.lose(2)
            nodes.add(numbers[-1])
            here = [k in numbers for k in range(len(speeds))]

            def has_settled(here: list[bool] = here) -> bool:
                told = (directory / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
                lines[:] = [json.loads(line) for line in told if line.endswith("\n")]
                return sum(line["present"] == here for line in lines) > settled + compared

            ray_ends.wait(has_settled, what, 10 * _MOST_ROUND_SECS * (settled + compared))
            judged = [line for line in lines if line["present"] == here][settled:][:compared]
            costs = quota.WorkerCosts(0.0, [secs / speed for speed in np.array(speeds)[here]])
            took = np.array([line["round_secs"] for line in judged])
            best = np.mean(
                [
                    quota.optimal_round_secs(costs, int(sum(line["microbatches_done"])))
                    for line in judged
                ]
            )
            over = f"{took.mean() / best:.3f}"
            yield rows.Row(f"{what}: over the optimum", "<= 1.05", over, len(judged))
            yield rows.Row(f"{what}: a round", ">= .5 s", f"{took.mean():.2f} s", len(judged))
        (directory / "over").touch()
        ray_ends.wait(lambda: driver.process.poll() is not None, "the end of the run")


def main() -> None:
    os.environ.update(ray_nodes.VARIABLES)
    groups = {what: functools.partial(disturbed, what) for what in WHAT}
    groups |= {what: functools.partial(ended, what) for what in ray_ends.WHAT}
    groups["replaced"] = replaced
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
