"""The seconds of an epoch of each arm, measured without evaluation, all arms in turn.

They are seconds of the processor, which other programs disturb less than the clock: the process
keeps to one core, where both are the same while it is alone.
"""

import contextlib
import math
import statistics
import time
from typing import Any

import hetjax
from experiments.orders import arms, runs
from experiments.orders.tasks import Run, Task

_WARM_UP = 6  # rounds
_BLOCK_SECS = 1.5  # of the plain arm, at least
_ENDLESS = 10_000  # epochs


class _Rounds:
    """The rounds of one arm."""

    def __init__(self, run: hetjax.Run) -> None:
        self._run, self._state = run, run.init()

    def __call__(self, count: int) -> tuple[float, int]:
        """The seconds of so many rounds, and the examples that they took."""
        before, began = self._state.stream.examples_processed, time.process_time()
        for _ in range(count):
            self._state, _ = self._run.round(self._state)
        self._run.settle()
        secs = time.process_time() - began
        return secs, self._state.stream.examples_processed - before


def epoch_secs(task: Task, data_dir: str | None, *, repeats: int = 5) -> dict[str, list[float]]:
    """Seconds of an epoch of each arm, `repeats` times.

    Each is found of a block of rounds, by the examples that they took; of whole epochs where these
    are short, and of an order that not all epochs make anew, of as many as it takes to make it
    once. A first block is not timed: at the end of an epoch something may be compiled.
    """
    first: dict[str, Any] = {"learning_rate": task.learning_rates[0], "seed": task.seeds[0]}
    with contextlib.ExitStack() as stack:
        rounds = {}
        for arm in task.arms:
            opened = runs.open_run(Run(task, arm, **first), data_dir, {"epochs": _ENDLESS})
            rounds[arm] = _Rounds(stack.enter_context(hetjax.Run(**opened.arguments())))
        for turn in rounds.values():
            turn(_WARM_UP)
        plain = statistics.median(rounds[arms.BASELINE](1)[0] for _ in range(_WARM_UP))
        count = max(8, math.ceil(_BLOCK_SECS / plain))
        counts = {arm: _whole_epochs(task, arm, count) for arm in rounds}
        secs: dict[str, list[float]] = {arm: [] for arm in rounds}
        for is_timed in (False, *[True] * repeats):
            for arm, turn in rounds.items():
                taken, examples = turn(counts[arm])
                if is_timed:
                    secs[arm].append(taken / examples * task.experiment.data.num_train)
    return secs


def _whole_epochs(task: Task, arm: str, count: int) -> int:
    """So many rounds, or a few more: what makes a cycle of an order, or whole short epochs."""
    every = arms.ARMS[arm].ordering.get("balance_every", 1)
    cycle = every * task.epoch_rounds
    return count if every == 1 and count < cycle else math.ceil(count / cycle) * cycle
