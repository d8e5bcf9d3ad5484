"""What a round tells: its line, and a report whose numbers may still be on the devices.

A `Report` is read when somebody asks for a number; `read` waits for it then and makes the
`RoundReport`, the line of `metrics.jsonl`. So the host can say what a round did while the next one
computes.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hetjax import parts as parts_lib
from hetjax import types
from hetjax.data import stream
from hetjax.local import packing
from hetjax.losses import loss as losses_lib
from hetjax.rounds import nonfinite, programs, references, run_state, sync
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds import weighting as weighting_lib

_ASKED = ("params", "model_state", "opt_state", "ema_params", "ema_model_state")  # by a callback
NO_AVERAGE = "this run keeps no average; give ema=, such as ema=0.999"


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
    exchange_secs: float | None = None  # of this process; posting, sums, mixing, update
    eval: dict[str, float] | None = None  # by name, where it was evaluated after this round
    bytes_sent: int = 0  # by all workers, as the reducer counts them
    consensus: dict[str, float] | None = None  # distance of the replicas from their mean
    metrics: dict[str, float] | None = None  # of the loss function: means over the round
    learning_rate: float | None = None  # of the round's update, where the optimiser's state has one
    grad_norm: float | None = None  # of the round's gradient, before the optimiser clips it
    update_norm: float | None = None  # of what was added to the parameters
    weight_sum: float | None = None  # of its examples, where it is 0 or less: there was no update
    model_state: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """As `params`: of the model; () where it keeps none."""
    opt_state: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """As `params`: of the optimiser."""
    ema_params: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """As `params`: the average of the parameters, by `ema`."""
    ema_model_state: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """As `params`: the average of the model's state, by `ema`."""
    params: Callable[[], types.PyTree] = dataclasses.field(
        default=_no_params, repr=False, compare=False
    )
    """While a callback runs: the parameters after this round, as NumPy arrays. They are copied
    from the device when asked for. With a reducer that gossips, the mean of the replicas that this
    process has."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, without fields that are None; not-finite numbers are None.

        Returns:
            `{name: value}`, of numbers, texts, lists and dicts of them.
        """
        given = {name: value for name, value in vars(self).items() if name not in _ASKED}
        return {name: plain(value) for name, value in given.items() if value is not None}


class NonFiniteError(ValueError):
    """A microbatch's loss or gradient was not finite, and `nonfinite='stop'`.

    Attributes:
        result: the `FitResult` up to the round before it, whose state was kept; from `fit` alone.
    """

    result: Any


class Report:
    """A round that is done. Every field of `RoundReport` is an attribute; reading one waits.

    The round ends when the next one begins. A report that is read before ends it at once.

    Args:
        setup: of the run.
        settle: waits until the round is over, and calls `end`.
        state_of: what a round left, of its report; None where it is not known any more.
        executed: what came of it.
        examples: processed in it, by all workers.
        examples_processed: since the run began.

    Attributes:
        asked: by any process, of all; known without waiting.
        mean: of a `Run`'s round without update the mean contribution, leaves `[W, ...]`.
        own: the same of the rule's `own_sums` over the round's weight.
    """

    mean: types.PyTree = ()
    own: types.PyTree = ()

    def __init__(
        self,
        setup: setup_lib.Setup,
        executed: run_state.Executed,
        *,
        settle: Callable[[], None],
        state_of: Callable[["Report"], Any],
        examples: int,
        examples_processed: int,
    ) -> None:
        nothing: Any = None  # a report holds no state: its buffers are the next round's
        self._setup, self._plan = setup, executed.plan._replace(state=nothing)
        self._work = executed.work
        self._metrics, self._step_norms = executed.sums.metrics, executed.sums.step
        self.asked = executed.asked
        self._settle, self._state_of = settle, state_of
        self._examples, self._examples_processed = examples, examples_processed
        self._round_secs: float | None = None
        self._exchange_secs: float | None = None
        self._line: RoundReport | None = None
        self._totals: types.SyncMetrics | None = None

    @property
    def done(self) -> stream.Assignment:
        """The microbatches that were done, for `Run.round(..., again=…)`; without waiting."""
        return stream.done_of(self._plan.assigned, self._work.microbatches_done)

    def end(self, now: float) -> None:
        """Says when the round was over, unless that is known already."""
        if self._round_secs is None:
            virtual = self._setup.speeds.clock.virtual
            began = self._plan.began or now
            self._round_secs = self._work.local_secs if virtual else now - began

    def exchanged(self, secs: float) -> None:
        """Says how long sums, mixing and update took, unless that is known already."""
        if self._exchange_secs is None and not self._setup.speeds.clock.virtual:
            self._exchange_secs = secs

    @functools.cached_property
    def references(self) -> references.References | None:
        """None where the true speeds are not known, or a gate may close the round."""
        return references.of(self._setup, self._plan)

    @property
    def totals(self) -> types.SyncMetrics:
        """The sums of the round, on the host; waits for them. NaN is the loss of a rule that adds
        up none."""
        if self._totals is None:
            totals = jax.tree.map(np.asarray, self._metrics)
            self._totals = packing.unpack(totals)
            if self._plan.programs.rule.loss_sum is None:
                nothing: Any = np.float64(np.nan)
                self._totals = self._totals._replace(loss_sum=nothing)
        return self._totals

    @property
    def divisor(self) -> float:
        """What the sums of the round were divided by; 0 or less: no update was made of them.

        The sum of the weights, or with `weighting=shard` of each worker's in the measure of its
        shard. Where each worker divides by its own number, the largest.
        """
        totals, config = self.totals, self._setup.config
        if (totals.worker_weights[totals.example_count > 0] > 0).all():
            return float(totals.weight_sum)
        gossips = self._setup.methods.reducer.mixing is not None
        found = weighting_lib.parts(
            programs.weighting(config, gossips=gossips),
            totals,
            jax.numpy.asarray(self._setup.stream.shares),
            added_up=not gossips,
            nominal=programs.nominal_examples(config) / len(self._setup.where.devices),
        )
        return float(np.max(found.divisor))

    @property
    def _has_no_update(self) -> bool:
        """Whether it had examples, whose weights add up to 0 or less."""
        return bool(self.totals.example_count.sum() > 0 and self.divisor <= 0)

    def _step(self) -> dict[str, Any]:
        """How far the update went, of what is known and finite; {} where there was no update."""
        step = self._step_norms
        mine = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], step)
        found = packing.unpack(mine)
        numbers = {name: float(x) for name, x in found._asdict().items()} if found else {}
        return {name: x for name, x in numbers.items() if not math.isnan(x)}

    def read(self) -> RoundReport:
        """All of it on the host; waits for it.

        Raises:
            RuntimeError: the devices did other microbatches than the clocks saw.
        """
        if self._line is None:
            if self._round_secs is None:
                self._settle()
                self.end(time.perf_counter())
            self._line = self._read()
        return self._line

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in RoundReport.__dataclass_fields__:
            raise AttributeError(f"a report has no {name!r}")
        return getattr(self.read(), name)

    def check(self) -> None:
        """Waits for the round.

        Raises:
            NonFiniteError: a microbatch of it was not finite, and the run is to stop.
            ValueError: the weight that a rule of the user's makes is not finite.
        """
        bad = np.flatnonzero(self.totals.nonfinite_microbatch >= 0)
        if not bad.size or self._setup.config.nonfinite != "stop":
            weights = np.asarray(self.totals.worker_weights)  # what is skipped is in none of them
            if not np.isfinite(weights).all():
                raise self._of_weights(weights)
            return
        setup, plan = self._setup, self._plan
        guilty = nonfinite.guilty_of(setup, plan, np.asarray(self.totals.nonfinite_microbatch))
        told = f"{nonfinite.told(setup, plan, self._state_of(self), guilty)} ".lstrip()
        or_skip = ", look at these examples, or set nonfinite='skip' to leave such microbatches out"
        is_one_sum = self._setup.programs.embedding is not None  # over the examples of all workers
        if is_one_sum or not self._plan.programs.updates:  # of a sum that others go on from
            or_skip = ", or look at these examples"
        raise NonFiniteError(
            f"round {plan.round_index}: the loss or a gradient of worker {guilty.worker}'s "
            f"microbatch {guilty.position} is not finite (examples {nonfinite.shown(guilty.ids)}). "
            f"{told}The state before this round was kept. Lower the learning rate, clip "
            f"gradients{or_skip}"
        )

    def _of_weights(self, weights: np.ndarray) -> ValueError:
        """That one of them is not finite."""
        worker = int(np.flatnonzero(~np.isfinite(weights))[0])
        finish = self._plan.programs.rule.finish
        return ValueError(
            f"rule: its finish, {parts_lib.path_of(finish)}, returned the weight "
            f"{weights[worker]} of worker {worker} in round {self._plan.round_index}; it must "
            "return a finite number, which the sums of all workers are divided by"
        )

    def check_reducer(self, sums: sync.Synchronised) -> None:
        """Looks at what a reducer of the user's made, if it says that replicas stay equal.

        All processes call it, after the first round, of which `sums` are.

        Raises:
            ValueError: the workers have different numbers of it, or NaN of finite ones.
        """
        reducer, state = self._setup.methods.reducer, sums.state
        if reducer.is_plain_sum or not reducer.keeps_replicas_equal:
            return
        of_round: dict[str, Any] = {"mean": sums.mean}
        if isinstance(state, types.TrainState):
            of_round |= {"params": state.params, "opt_state": state.opt_state}
        state_lib.check_equal(of_round, reducer.name)
        if jax.tree.leaves(sums.step) and "grad_norm" not in self._step():
            self.check()  # or the loss's own were no numbers
            raise ValueError(
                f"{reducer.name}: in the first round it made NaN of finite sums. Its "
                "collective(sums, axis_name) and array(sums) must return finite numbers"
            )

    def _read(self) -> RoundReport:
        plan, metrics = self._plan, self.totals
        work = self._work
        if not np.array_equal(metrics.microbatches_done, work.microbatches_done):
            raise RuntimeError(
                f"round {plan.round_index}: the workers' sums hold {metrics.microbatches_done} "
                f"microbatches, their clocks saw {work.microbatches_done}"
            )
        loss_sum, weight_sum = np.float64(metrics.loss_sum), np.float64(metrics.weight_sum)
        busy_secs = work.compute_secs + work.host_secs
        longest = max(work.local_secs, float(busy_secs.max()))  # as `summary.longest_secs`
        waiting = (longest - busy_secs)[plan.present]
        return RoundReport(
            round=plan.round_index or 0,
            epoch=plan.epoch,
            examples=self._examples,
            examples_processed=self._examples_processed,
            skipped_examples=self._examples - int(metrics.example_count.sum()),
            loss=float(loss_sum / weight_sum) if weight_sum > 0 else float("nan"),
            quotas=plan.quotas.tolist(),
            microbatches_done=work.microbatches_done.tolist(),
            examples_counted=metrics.example_count.tolist(),
            present=plan.present.tolist(),
            compute_secs=work.compute_secs.tolist(),
            start_secs=0.0,
            local_secs=work.local_secs,
            round_secs=self._round_secs or 0.0,
            waiting_fraction=float(waiting.mean() / longest) if longest > 0 else 0.0,
            full=plan.is_full,
            overruns=int(work.overruns.sum()),
            optimal_round_secs=None if self.references is None else self.references.optimal_secs,
            host_secs=work.host_secs.tolist() if work.host_secs.any() else None,
            exchange_secs=self._exchange_secs,
            metrics=losses_lib.means(metrics.metric_sums) or None,
            **self._step(),
            weight_sum=self.divisor if self._has_no_update else None,
            bytes_sent=round(
                self._setup.methods.reducer.copies_sent(plan.active) * self._setup.copy_bytes
            ),
        )


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
