"""Which size of a microbatch is large enough? Examples a second over sizes, on this device.

What is timed is the program that a round calls for each microbatch, of a `Run` of one worker: loss,
gradient, and the sums in place. The examples lie on the device already. Reading them, the
synchronisation and the update do not depend on the size, or are not the device's.
"""

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hetjax import memory, types
from hetjax import mesh as mesh_lib
from hetjax.data import sources
from hetjax.local import calls
from hetjax.losses import batch_loss, stateful
from hetjax.losses import loss as losses_lib
from hetjax.report import words
from hetjax.rounds import run as run_lib

_SMALLEST, _LARGEST = 8, 4096  # by default
_TURNS = 3, 25  # fewest and most, in which every size is timed once
_FIRST_SECS = 0.1  # in which a size is timed before them
_IN_VAIN = 3  # sizes in a row that gain nothing, after which no larger one is tried


@dataclasses.dataclass(frozen=True)
class SizeRow:
    """What microbatches of one size reached."""

    microbatch_size: int
    secs: float  # of a microbatch, in the fastest turn: what else the machine does only adds
    memory_bytes: int | None  # at most, as XLA counts it; None: it does not say

    @property
    def examples_per_sec(self) -> float:
        """Examples a second of this device alone."""
        return self.microbatch_size / self.secs


@dataclasses.dataclass(frozen=True)
class MicrobatchTuning:
    """What `tune_microbatch` found; `print` shows it as a table."""

    microbatch_size: int
    """The size beyond which nothing is gained."""
    rows: tuple[SizeRow, ...]
    """Of each size, from the smallest on."""
    stopped: str = ""
    """Why no larger size was tried; "" where the list of sizes was at its end."""

    def __str__(self) -> str:
        best = max(row.examples_per_sec for row in self.rows)
        lines = ["microbatch_size  examples/s  of the best  ms a microbatch     memory"]
        for row in self.rows:
            used = "" if row.memory_bytes is None else words.size(row.memory_bytes)
            lines.append(
                f"{row.microbatch_size:>15}  {row.examples_per_sec:>10,.0f}  "
                f"{row.examples_per_sec / best:>11.0%}  {1e3 * row.secs:>15.3g}  {used:>9}"
                f"{'  <' if row.microbatch_size == self.microbatch_size else ''}"
            )
        end = f" {self.stopped}." if self.stopped else ""
        return "\n".join([*lines, f"take microbatch_size={self.microbatch_size}.{end}"])


def tune_microbatch(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    source: Any,
    *,
    sizes: Sequence[int] | None = None,
    within: float = 0.03,
    secs: float = 3.0,
    model_state: types.PyTree | None = None,
    state_reduce: Mapping[str, str] | None = None,
    per_example_rng: bool = False,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    **fields: Any,
) -> MicrobatchTuning:
    """Measures examples a second over sizes of a microbatch, and says which is large enough.

    A device computes few examples at a time slowly, and small microbatches divide well among
    workers. So take the smallest size that costs nothing. Each size is compiled, then all are
    timed in turns, each turn over the same examples. Larger sizes are not tried once three in a row
    were faster by less than `within`, or the next one has no room in memory.

    Args:
        loss_fn: as for `fit`; not a `batch_loss`, whose rounds have two passes.
        params: a pytree of arrays; they stay as they are.
        source: the examples, as for `fit`.
        sizes: i64[k], examples of a microbatch; None: powers of two from 8 to 4,096, as far as
            there are examples.
        within: part of the most examples a second that the chosen size may lack.
        secs: seconds of measuring, in which every size has three turns at least; compiling comes
            on top.
        model_state, state_reduce, per_example_rng: as for `fit`.
        progress: print the table.
        clock: seconds, as `time.perf_counter` gives them.
        **fields: fields of the configuration that change what a microbatch computes, such as
            `ordering="d_grab"` or `seed`.

    Returns:
        `microbatch_size`, the smallest size within `within` of the best, and `rows`: of each size
        its examples a second (examples/s), seconds a microbatch, and bytes.

    Raises:
        ValueError: an argument is out of range, the loss is none that `fit` would take, or several
            processes have joined.

    """
    if fields.get("slices"):
        raise ValueError("tune_microbatch: slices is given, and a worker of one device is timed")
    loss_fn = stateful.of(loss_fn, model_state, state_reduce)
    source = sources.as_source(source)
    chosen = _checked(loss_fn, len(source), sizes, within, secs)
    make = {"per_example_rng": per_example_rng, **fields}
    timed: list[_Timed] = []
    stopped = ""
    for size in chosen:
        one = _Timed(loss_fn, params, source, size, clock, make)
        if stopped := one.lacks_room():
            break
        one.call()  # the first is cold
        timed.append(one)
        _time(timed[-1:], chosen[-1])
        if sizes is None and _gains_nothing(timed, within):
            _time(timed, chosen[-1])  # again: it may have been the machine
            if _gains_nothing(timed, within):
                stopped = f"{timed[-_IN_VAIN].size} to {size} gained nothing"
                break
    if not timed:
        raise ValueError(f"tune_microbatch: {stopped}; give sizes= with smaller ones")
    for one in timed:
        one.secs = float("inf")  # those turns were short
    began, turns = clock(), 0
    while turns < _TURNS[0] or (turns < _TURNS[1] and clock() - began < secs):
        for one in timed:
            one.turn(timed[-1].size, secs / (_TURNS[0] * len(timed)))
        turns += 1
    rows = tuple(one.row() for one in timed)
    enough = (1.0 - within) * max(row.examples_per_sec for row in rows)
    found = next(row.microbatch_size for row in rows if row.examples_per_sec >= enough)
    tuning = MicrobatchTuning(found, rows, stopped)
    if progress:
        print(tuning)
    return tuning


def _checked(
    loss_fn: Any, num_examples: int, sizes: Any, within: float, secs: float
) -> Sequence[int]:
    """The sizes, in their order."""
    if isinstance(loss_fn, batch_loss.BatchLoss):
        raise ValueError(
            "tune_microbatch: loss_fn is a batch_loss, whose rounds pass over each microbatch "
            "twice; time `fit` with a few values of microbatch_size in its place"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"tune_microbatch: {jax.process_count()} processes have joined; it measures one device "
            "alone. Call it in a program of its own, without join_processes"
        )
    for name, value, top in (("within", within, 1.0), ("secs", secs, float("inf"))):
        if not 0.0 < value < top:
            raise ValueError(
                f"tune_microbatch: {name} is {value!r}; it must be above 0"
                + (f" and below {top:g}" if np.isfinite(top) else "")
            )
    if sizes is None:
        powers = [2**k for k in range(_LARGEST.bit_length())]
        return [k for k in powers if _SMALLEST <= k <= num_examples] or [num_examples]
    try:
        found = sorted({operator.index(size) for size in sizes})
    except TypeError:
        found = []
    if not found or found[0] < 1 or found[-1] > num_examples:
        raise ValueError(
            f"tune_microbatch: sizes is {sizes!r}; it must hold whole numbers from 1 to the "
            f"{num_examples} examples of the source, such as (32, 64, 128)"
        )
    return found


class _Timed:
    """The program of microbatches of one size, and what its calls took."""

    def __init__(
        self,
        loss_fn: losses_lib.LossFn,
        params: types.PyTree,
        source: Any,
        size: int,
        clock: Callable[[], float],
        fields: dict[str, Any],
    ) -> None:
        self.size, self._clock = size, clock
        self.secs = float("inf")  # of a microbatch, in the fastest turn
        same = {"workers": 1, "budget": 1, "local": "stepped"}
        options = {"loss_over": "microbatch", **fields, **same, "microbatch_size": size}
        # The update is not computed here; that there is one is part of the program.
        with run_lib.Run(loss_fn, params, optax.sgd(0.0), source, **options) as run:
            setup, train = run.setup, run.setup.begun
            steps = setup.programs.main.steps
            begun = setup.programs.main.begin(train.params, train.kept, ())
            of_worker = train.params, train.model_state, begun
            own, model_state, self._carried = mesh_lib.worker_rows(of_worker)[0]
            ids = np.arange(size, dtype=np.int32)
            examples = setup.feed.lend(0, ids, 0)
            rng = jax.device_put(jax.random.fold_in(setup.rng, 0), setup.where.own_device)
            self._shared = types.Shared(own, (), model_state)
            self._given = examples, rng
            self._device = setup.where.own_device
            (add, *_) = calls.jit_adds(steps, setup.where, marked=False)
            self._program = add.__wrapped__.lower(
                self._shared, self._carried, *self._given
            ).compile()

    def lacks_room(self) -> str:
        """That the device has no room for what the program takes; "" where it has, or is silent."""
        sizes = self._program.memory_analysis()
        stats = self._device.memory_stats() or {}
        free = memory.free_bytes() if self._device.platform == "cpu" else None
        if "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if sizes is None or free is None:
            return ""
        needed = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        if needed <= free:
            return ""
        return (
            f"microbatches of {self.size} need {words.size(needed)} more, and "
            f"{words.size(free)} are free"
        )

    def call(self) -> None:
        """One microbatch, waited for as a round does."""
        self._carried, _ = self._program(self._shared, self._carried, *self._given)
        jax.block_until_ready(self._carried)

    def turn(self, num_examples: int, most_secs: float) -> None:
        """Times the microbatches of so many examples, fewer where these take too long.

        All together: the fastest of many short calls would be more favoured than that of few long.
        """
        began, count, taken = self._clock(), 0, 0.0
        while count < max(num_examples // self.size, 1) and taken <= most_secs:
            self.call()
            count, taken = count + 1, self._clock() - began
        self.secs = min(self.secs, taken / count)

    def row(self) -> SizeRow:
        """What it reached."""
        sizes = self._program.memory_analysis()
        used = None
        if sizes is not None:
            used = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
            used += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return SizeRow(self.size, self.secs, used)


def _time(timed: Sequence[_Timed], num_examples: int) -> None:
    """A few turns of these sizes, to know about how fast they are."""
    for _ in range(_TURNS[0]):
        for one in timed:
            one.turn(num_examples, _FIRST_SECS / _TURNS[0])


def _gains_nothing(timed: Sequence[_Timed], within: float) -> bool:
    """Whether the newest sizes are no faster than one before them."""
    speeds = [one.size / one.secs for one in timed]
    newest, before = speeds[-_IN_VAIN:], speeds[:-_IN_VAIN]
    return bool(before) and max(newest) < (1.0 + within) * max(before)
