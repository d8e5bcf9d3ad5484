"""The tasks and the arms of the study of local steps, and the grid on which rates are tuned.

An arm is given its examples, its workers and two rates. `inner` is that of each worker's own steps,
or of all-reduce's updates. `outer` is that of what the workers' steps add up to.
"""

import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import optax

from experiments import tasks as tasks_lib
from hetjax.data import sources
from hetjax.zoo import config as config_lib
from hetjax.zoo import datasets, text

SECS = (0.25, 0.5, 1.0, 1.0)  # of a microbatch, of each worker: speeds 4 : 2 : 1 : 1
SEEDS = (0, 1, 2)
MICROBATCH = 8  # examples
LENGTH = 64  # bytes of an example of text
OUTER = (0.1, 0.35, 0.7)
LINKS = {"none": float("inf"), "1 Gb/s": 1e9 / 8, "25 Mb/s": 25e6 / 8}  # bytes a second
DELAY_PERIOD = 4  # hand-ins between two uses of the outer momentum (2401.09135)


class Task(NamedTuple):
    """What is trained."""

    name: str
    config: str  # file
    inner: tuple[float, ...]  # rates
    begun: int  # examples of all-reduce before the arms begin
    examples: int  # of an arm
    tuned: int  # examples of an arm while its rates are tuned
    evaluated: int  # examples that are held out

    def optimizer(self, rate: Any) -> optax.GradientTransformation:
        if self.name == "wikitext2":
            return optax.adamw(rate, weight_decay=0.01)
        return optax.sgd(rate, momentum=0.9)

    def made(self, data_dir: str) -> tuple[tasks_lib.Task, Any]:
        """The task, and the arrays of what is held out."""
        config = config_lib.load(self.config)
        config.data.dir = data_dir
        if self.name == "wikitext2":
            config.data.length = LENGTH
        checked = config_lib.validate(config.to_dict())
        dataset = _bytes(pathlib.Path(data_dir)) if self.name == "wikitext2" else None
        made = tasks_lib.make(checked, dataset)
        held_out = next(iter(made.evals.values()))
        return made, sources.fetch(held_out, np.arange(self.evaluated))


_EXAMPLES = {
    "wikitext2": {"begun": 3_072, "examples": 12_800, "tuned": 5_120, "evaluated": 1_024},
    "cifar10": {"begun": 6_144, "examples": 25_600, "tuned": 7_680, "evaluated": 2_048},
}
TASKS = {
    name: Task(name, f"configs/{config}.py", rates, **_EXAMPLES[name])
    for name, config, rates in (
        ("wikitext2", "wikitext2_transformer", (1e-3, 3e-3, 9e-3)),
        ("cifar10", "cifar10_resnet8", (0.01, 0.03, 0.1)),
    )
}


class Arm(NamedTuple):
    """How a task is trained by four workers.

    Args:
        steps: of a worker in a round, in the mean; 0: one update a round by all-reduce.
        unequal: quotas go by speed; else all take as many.
        options: of `hetjax.local_steps`.
        wire: of what is handed in.
        gate: the share of the budget that closes a round.
        workers: how many there are.
        delays: asynchronous; each hands in alone, and the outer momentum is used once in so many.
        momentum: the outer one, Nesterov's.
        rates_of: the arm whose rates it takes; "": its own are tuned.
    """

    name: str
    steps: int
    unequal: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    wire: str = "float32"
    gate: float = 1.0
    workers: int = 4
    delays: int = 0
    momentum: float = 0.9
    rates_of: str = ""


UNEQUAL = "16 steps, unequal"
_SAME = {"rates_of": UNEQUAL}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("all-reduce, equal", 0, unequal=False, rates_of="all-reduce, adaptive"),
        Arm("all-reduce, adaptive", 0),
        Arm("one worker, 16 steps", 16, workers=1),
        Arm("4 steps, equal", 4, unequal=False),
        Arm("4 steps, unequal", 4),
        Arm("16 steps, equal", 16, unequal=False),
        Arm(UNEQUAL, 16),
        Arm("uniform", 16, options=(("weights", "uniform"),), **_SAME),
        Arm("fednova", 16, options=(("keep", False), ("weights", "fednova"))),
        Arm("bfloat16", 16, wire="bfloat16", **_SAME),
        Arm("int8", 16, wire="int8", **_SAME),
        Arm("int4", 16, wire="int4", **_SAME),
        Arm("equal, closed at 3/4", 16, unequal=False, gate=0.75, **_SAME),
        Arm("asynchronous", 16, delays=1, momentum=0.0),
        Arm("asynchronous, Nesterov", 16, delays=1),
        Arm("asynchronous, delayed Nesterov", 16, delays=DELAY_PERIOD),
    )
}


class Run(NamedTuple):
    """One run of the study."""

    task: str
    arm: str
    seed: int
    inner: float
    outer: float
    examples: int

    @property
    def settings(self) -> dict[str, Any]:
        """All that its result depends on."""
        return {"task": TASKS[self.task]._asdict(), "arm": ARMS[self.arm]._asdict()} | {
            name: value for name, value in self._asdict().items() if name not in ("task", "arm")
        }


def arms_of(task: str) -> Iterator[Arm]:
    """Those that a task has: AdamW is no optimiser for FedNova."""
    return (arm for arm in ARMS.values() if (task, arm.name) != ("wikitext2", "fednova"))


def grid(task: str, arm: Arm) -> list[Run]:
    """The runs by which an arm's rates are tuned: of the first seed, by the loss at their end."""
    of = TASKS[task]
    outer = OUTER if arm.steps else (1.0,)
    return [
        Run(task, arm.name, SEEDS[0], a, b, of.tuned)
        for a in of.inner
        for b in (() if arm.rates_of else outer)
    ]


def _bytes(data_dir: pathlib.Path) -> datasets.Dataset:
    """WikiText-2, byte by byte."""

    def chunks(split: str) -> sources.ArraySource:
        content = (data_dir / "wikitext2" / f"wiki.{split}.tokens").read_bytes()
        tokens = np.frombuffer(content, np.uint8).astype(np.int32)
        return sources.ArraySource({"tokens": text.chunks(tokens, LENGTH, vocabulary_size=256)})

    train, held_out = chunks("train"), chunks("valid")
    return datasets.Dataset(
        train, {"val": held_out}, 256, (LENGTH + 1,), "wikitext2 bytes", "tokens"
    )
