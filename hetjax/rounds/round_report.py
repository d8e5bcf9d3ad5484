"""The line of a round: what `metrics.jsonl` and callbacks are given of it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax import types


def _no_params() -> types.PyTree:
    raise ValueError(
        "report.params: a callback asks for them while it runs; this report is of a round that is "
        "past. In a loop of your own ask run.params(state); of a run that is over, result.params"
    )


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """One round, on the host: a line of `metrics.jsonl`, and what callbacks are given.

    Times are seconds of the run's clock, which stands still during evaluations.
    """

    round: int
    epoch: int
    examples: int  # processed in this round, by all workers
    examples_processed: int  # since the run began
    skipped_examples: int  # of `examples`: in microbatches that were not finite
    loss: float  # mean over the round; NaN where no example has a weight, or the rule no loss
    quotas: list[int]  # microbatches, [W]
    microbatches_done: list[int]  # [W]; what is left of the quotas went back to the order
    examples_counted: list[int]  # [W], that entered the sums
    present: list[bool]  # [W]
    compute_secs: list[float]  # each worker's own, [W]
    start_secs: float
    local_secs: float  # the longest local phase
    round_secs: float  # to the start of the next round
    waiting_fraction: float  # of compute_secs and host_secs of who is present
    full: bool  # of the whole budget; the last round of an epoch is smaller
    overruns: int  # microbatches slower than the emulated worker
    optimal_round_secs: float | None = None  # exact optimum for the true speeds, if known
    host_secs: list[float] | None = None  # of its process, beside compute_secs; None: unknown, [W]
    eval: dict[str, float] | None = None
    bytes_sent: int = 0  # by all workers, as the reducer counts them
    consensus: dict[str, float] | None = None  # distance of the replicas from their mean
    herding: dict[str, float] | None = None  # bounds of the order to come and of a random one
    metrics: dict[str, float] | None = None  # of the loss function: means over the round
    learning_rate: float | None = None  # of the round's update, where the optimiser's state has one
    grad_norm: float | None = None  # of the round's gradient, before the optimiser clips it
    update_norm: float | None = None  # of what was added to the parameters
    weight_sum: float | None = None  # of its examples, where it is 0 or less: there was no update
    params: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """While a callback runs: the parameters after this round, as NumPy arrays. They are copied
    from the device when asked for. With a reducer that gossips, the mean of the replicas that this
    process has."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, without fields that are None; not-finite numbers are None."""
        given = {name: value for name, value in vars(self).items() if name != "params"}
        return {name: plain(value) for name, value in given.items() if value is not None}


def from_plain(line: dict[str, Any]) -> RoundReport:
    """As `RoundReport.to_plain` made it.

    Raises:
        TypeError: it has other fields.
    """
    fields: dict[str, Any] = {k: np.nan if x is None else x for k, x in line.items()}
    return RoundReport(**fields)


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
