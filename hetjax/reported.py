"""The numbers of a round on the host, in groups; in their line of `metrics.jsonl` they lie flat."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from hetjax import types


def while_called(refuse: Any) -> Any:
    """A field of a report: a function that a callback calls, or a group of them; afterwards it is
    `refuse`."""
    return dataclasses.field(default=refuse, repr=False, compare=False)


def _no_params() -> types.PyTree:
    raise ValueError("report.params: this round is past; ask run.params(state), or result.params")


class RoundCounts(NamedTuple):
    """What all workers of a round did."""

    examples: int
    """Processed in this round."""
    examples_processed: int
    """Since the run began."""
    skipped_examples: int
    """Of `examples`, those in microbatches that were not finite."""
    full: bool
    """Whether the round had the whole budget; the last round of an epoch is smaller."""
    overruns: int
    """Microbatches slower than the emulated worker."""
    bytes_sent: int
    """Bytes for the reducer and to coordinate the order."""
    bytes_of_sums: int = 0
    """Of `bytes_sent`, those of what has been added up."""


class RoundWorkers(NamedTuple):
    """What each worker of a round did; lists of W."""

    microbatches_done: list[int]
    """`[W]`; what is left of the quotas went back to the order."""
    examples_counted: list[int]
    """`[W]`, examples that entered the sums."""
    present: list[bool]
    """`[W]`, whether the worker took part."""
    compute_secs: list[float]
    """`[W]`, seconds to the end of its last microbatch, by its own clock."""
    host_secs: list[float] | None = None
    """`[W]`, seconds of its process beside `compute_secs`; None: unknown."""
    changes: list[tuple[int, str]] | None = None
    """In a run apart, workers that came or went in it: `(worker, what happened)`."""


class ReportedTimes(NamedTuple):
    """When a round was, and what its time went into; seconds of the run's clock."""

    start_secs: float
    """When the round began."""
    local_secs: float
    """Seconds of the longest local phase."""
    round_secs: float
    """Seconds to the start of the next round."""
    waiting_fraction: float
    """0 to 1: the mean over the workers present of 1 - busy / longest busy, where busy is
    `compute_secs` and `host_secs`."""
    exchange_secs: float | None = None
    """Seconds of this process for posting, sums, mixing, update."""
    optimal_round_secs: float | None = None
    """Seconds of the shortest round possible, where the true speeds are known."""


class RoundUpdate(NamedTuple):
    """What the update of a round was like; None where that is not known, or there was none."""

    learning_rate: float | None = None
    """Where the optimiser's state has one."""
    grad_norm: float | None = None
    """Euclidean norm of the round's gradient, before the optimiser clips it."""
    update_norm: float | None = None
    """Euclidean norm of what was added to the parameters."""
    weight_sum: float | None = None
    """Of the round's examples, where it is 0 or less: there was no update."""


class RoundStates(NamedTuple):
    """What a callback may ask for beside `params`, and as that."""

    opt_state: Callable[[], types.PyTree] = _no_params
    """Of the optimiser."""
    model_state: Callable[[], types.PyTree] = _no_params
    """Of the model; () where it keeps none."""
    ema_params: Callable[[], types.PyTree] = _no_params
    """The average of the parameters, by `ema`."""
    ema_model_state: Callable[[], types.PyTree] = _no_params
    """The average of the model's state, by `ema`."""


class Grouped:
    """A report of named fields and of groups of them, which are named tuples.

    A field's name is its own in all groups. So in a line of `metrics.jsonl` all lie flat.
    """

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """With its fields, and those of its groups, by name.

        Raises:
            TypeError: it has other fields.
        """
        groups: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            if isinstance(kind, type) and issubclass(kind, tuple):
                own = {each: fields.pop(each) for each in kind.__annotations__ if each in fields}
                groups[name] = kind(**own)
        return cls(**fields, **groups)

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, without fields that are None; not-finite numbers are None.

        Returns:
            `{name: value}`, of numbers, texts, lists and dicts of them.
        """
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            found |= value._asdict() if hasattr(value, "_fields") else {name: value}
        return {k: plain(x) for k, x in found.items() if x is not None and not callable(x)}


@dataclasses.dataclass(frozen=True)
class RoundReport(Grouped):
    """One round, on the host: a line of `metrics.jsonl`, and what callbacks are given.

    Times are seconds of the run's clock, which stands still during evaluations.
    """

    round: int
    """Number of the round, from 0."""
    epoch: int
    """Number of its epoch, from 0."""
    loss: float
    """Mean over the round; NaN where no example has a weight, or the rule no loss."""
    quotas: list[int]
    """`[W]`, microbatches that the policy assigned."""
    counts: RoundCounts
    """What all workers did: examples, bytes."""
    workers: RoundWorkers
    """What each worker did."""
    times: ReportedTimes
    """When the round was, and what its time went into."""
    update: RoundUpdate
    """What the update was like: its norms, its learning rate."""
    metrics: dict[str, float] | None = None
    """Of the loss function: means over the round."""
    values: dict[str, float] | None = None
    """Numbers among those of `fit(values=)`, in this round."""
    eval: dict[str, float] | None = None
    """By name, where it was evaluated after this round."""
    consensus: dict[str, float] | None = None
    """Distance of the replicas from their mean, with a reducer that gossips."""
    state: RoundStates = while_called(RoundStates())
    """What else a callback may ask for: states of optimiser and model, averages."""
    params: Callable[[], types.PyTree] = while_called(_no_params)
    """While a callback runs: the parameters after this round, as NumPy arrays. They are copied
    from the device when asked for. With a reducer that gossips, the mean of the replicas that this
    process has. They are those that the optimiser trains; of `optax.LookaheadParams` the slow
    ones."""


def from_plain(line: dict[str, Any]) -> RoundReport:
    """As `RoundReport.to_plain` made it.

    Raises:
        TypeError: it has other fields.
    """
    return RoundReport.of(**{k: np.nan if x is None else x for k, x in line.items()})


def plain(value: Any) -> Any:
    """JSON's own types, numbers to 9 digits, not-finite ones as None."""
    if type(value) in (int, bool, str):
        return value
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
