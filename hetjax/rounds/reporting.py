"""What a round tells: its numbers may still be on the devices when `Run.round` returns.

A `Report` is read when somebody asks for a number; `read` waits for it then. So the host can say
what a round did while the next one computes.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import parts as parts_lib
from hetjax import quota, types
from hetjax.data import stream
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import parcels, programs, round_report, run_records, setup, sync
from hetjax.rounds import state as state_lib
from hetjax.rounds import weighting as weighting_lib


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
        parts: of the run.
        settle: waits until the round is over, and calls `end`.
        plan: of the round.
        executed: what came of it.
        examples: processed in it, by all workers.
        examples_processed: since the run began.
        began: `perf_counter` when it began.

    Attributes:
        asked: by any process, of all; known without waiting.
        mean: of a `Run`'s round without update the mean contribution, leaves `[W, ...]`.
        own: the same of the rule's `own_sums` over the round's weight.
    """

    mean: types.PyTree = ()
    own: types.PyTree = ()

    def __init__(
        self,
        parts: setup.RunParts,
        plan: run_records.Plan,
        executed: run_records.Executed,
        *,
        settle: Callable[[], None],
        examples: int,
        examples_processed: int,
        began: float,
    ) -> None:
        nothing: Any = None  # a report holds no state: its buffers are the next round's
        self._parts, self._plan = parts, plan._replace(state=nothing)
        self._work = executed.work
        self._metrics, self._step_norms = executed.sums.metrics, executed.sums.step
        self.asked = executed.asked
        self._settle = settle
        self._examples, self._examples_processed = examples, examples_processed
        self._began = began
        self._round_secs: float | None = None
        self._line: round_report.RoundReport | None = None
        self._totals: types.SyncMetrics | None = None
        self.references = _references_of(parts, plan)

    @property
    def done(self) -> stream.Assignment:
        """The microbatches that were done, for `Run.round(..., again=…)`; without waiting."""
        return stream.done_of(self._plan.assigned, self._work.microbatches_done)

    def end(self, now: float) -> None:
        """Says when the round was over, unless that is known already."""
        if self._round_secs is None:
            virtual = self._parts.virtual_clock
            self._round_secs = self._work.local_secs if virtual else now - self._began

    @property
    def totals(self) -> types.SyncMetrics:
        """The sums of the round, on the host; waits for them. NaN is the loss of a rule that adds
        up none."""
        if self._totals is None:
            totals = jax.tree.map(np.asarray, self._metrics)
            self._totals = parcels.unpack(totals)
            if self._parts.programs_of(self._plan).rule.loss_sum is None:
                nothing: Any = np.float64(np.nan)
                self._totals = self._totals._replace(loss_sum=nothing)
        return self._totals

    @property
    def divisor(self) -> float:
        """What the sums of the round were divided by; 0 or less: no update was made of them.

        The sum of the weights, or with `weighting=shard` of each worker's in the measure of its
        shard. Where each worker divides by its own number, the largest.
        """
        totals, config = self.totals, self._parts.config
        if (totals.worker_weights[totals.example_count > 0] > 0).all():
            return float(totals.weight_sum)
        gossips = self._parts.reducer.mixing is not None
        found = weighting_lib.parts(
            programs.weighting(config, gossips=gossips),
            totals,
            jax.numpy.asarray(self._parts.stream.shares),
            added_up=not gossips,
            nominal=programs.nominal_examples(config) / len(self._parts.devices),
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
        found = parcels.unpack(mine)
        numbers = {name: float(x) for name, x in found._asdict().items()} if found else {}
        return {name: x for name, x in numbers.items() if not math.isnan(x)}

    def read(self) -> round_report.RoundReport:
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
        if name.startswith("_") or name not in round_report.RoundReport.__dataclass_fields__:
            raise AttributeError(f"a report has no {name!r}")
        return getattr(self.read(), name)

    def check(self) -> None:
        """Waits for the round.

        Raises:
            NonFiniteError: a microbatch of it was not finite, and the run is to stop.
            ValueError: the weight that a rule of the user's makes is not finite.
        """
        bad = np.flatnonzero(self.totals.nonfinite_microbatch >= 0)
        if not bad.size or self._parts.config.nonfinite != "stop":
            self._check_weights()  # what is skipped is in none of them
            return
        worker = int(bad[0])
        position = int(self.totals.nonfinite_microbatch[worker])
        ids = self._plan.assigned.microbatches(worker)[position]
        or_skip = ", look at these examples, or set nonfinite='skip' to leave such microbatches out"
        if not self._parts.programs_of(self._plan).updates:  # of a sum that others go on from
            or_skip = ", or look at these examples"
        raise NonFiniteError(
            f"round {self._plan.round_index}: the loss or a gradient of worker {worker}'s "
            f"microbatch {position} is not finite (examples {ids[ids >= 0].tolist()}). The state "
            f"before this round was kept. Lower the learning rate, clip gradients{or_skip}"
        )

    def _check_weights(self) -> None:
        bad = np.flatnonzero(~np.isfinite(weights := self.totals.worker_weights))
        if bad.size:
            finish = self._parts.programs_of(self._plan).rule.finish
            raise ValueError(
                f"rule: its finish, {parts_lib.path_of(finish)}, returned the weight "
                f"{weights[bad[0]]} of worker {bad[0]} in round {self._plan.round_index}; it must "
                "return a finite number, which the sums of all workers are divided by"
            )

    def check_reducer(self, sums: sync.Synchronised) -> None:
        """Looks at what a reducer of the user's made, if it says that replicas stay equal.

        All processes call it, after the first round, of which `sums` are.

        Raises:
            ValueError: the workers have different numbers of it, or NaN of finite ones.
        """
        reducer, state = self._parts.reducer, sums.state
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

    def _read(self) -> round_report.RoundReport:
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
        return round_report.RoundReport(
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
            metrics=losses_lib.means(metrics.metric_sums) or None,
            **self._step(),
            weight_sum=self.divisor if self._has_no_update else None,
            bytes_sent=round(self._parts.reducer.copies_sent(plan.active) * self._parts.copy_bytes),
        )


class References(NamedTuple):
    """How long a round would take at the true speeds, computing alone."""

    optimal_secs: float
    bound_secs: float  # with microbatches of any size
    equal_split_secs: float


def _references_of(parts: setup.RunParts, plan: run_records.Plan) -> References | None:
    """None where the true speeds are not known, or a gate may close the round."""
    if parts.cluster is None or not parts.emulated or parts.gate.closes:
        return None
    costs = parts.cluster.costs_at(plan.round_index or 0)
    return _references(
        costs.overhead_secs.tobytes(),
        costs.secs_per_microbatch.tobytes(),
        int(plan.quotas.sum()),
        plan.caps.tobytes(),
        parts.config.data.sharing == "private",
    )


@functools.lru_cache(256)
def _references(
    overhead: bytes, secs: bytes, total: int, caps: bytes, every_worker: bool
) -> References:
    costs = quota.WorkerCosts(np.frombuffer(overhead), np.frombuffer(secs))
    most = np.frombuffer(caps, np.int64)
    equal = quota.largest_remainder((most > 0).astype(np.float64), total, caps=most)
    best = quota.solve_quotas(costs, total, caps=most)
    if every_worker:  # private data: no shard may be left out
        best = stream.with_every_worker(best, most > 0)
    return References(
        float(costs.round_secs(best).max()),
        quota.continuous_bound_secs(costs, total, caps=most),
        float(costs.round_secs(equal).max()),
    )
