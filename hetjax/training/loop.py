"""The training loop: rounds of local and sync phases until the epochs are done.

It knows no policy, order, reducer or gate by name: `setup` builds them, records pass between them.
While the workers compute a round, the host reports the one before.
"""

import contextlib
import dataclasses
import functools
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hetjax import quota, types
from hetjax.data import rounds as rounds_lib
from hetjax.training import (
    agreement,
    evaluate,
    interrupt,
    local,
    record,
    setup,
    summary,
    telemetry,
)
from hetjax.training import resume as resume_lib
from hetjax.training import state as state_lib

Callback = Callable[[record.RoundReport], bool | None]


class NonFiniteError(ValueError):
    """A microbatch's loss or gradient was not finite, and `nonfinite='stop'`.

    Attributes:
        result: the `FitResult` up to the round before it, whose state was kept.
    """

    result: "FitResult"


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` returns; parameters as they were given, without worker axis."""

    params: types.PyTree
    """After the last round; the mean of the replicas where the reducer gossips."""
    state: types.TrainState
    """Of all workers, leaves `[num_workers, ...]`."""
    summary: dict[str, Any]
    """As `summary.json`."""
    history: list[dict[str, Any]]
    """As `metrics.jsonl`, a dict a round."""
    best_params: types.PyTree
    """At the evaluation with the lowest loss; `params` where no evaluation had a loss."""


@dataclasses.dataclass
class _Round:
    """A round that is done and not reported yet: its numbers may still be on the devices."""

    index: int
    epoch: int
    plan: rounds_lib.RoundPlan
    result: agreement.RoundResult
    present: np.ndarray
    full: bool
    references: summary.References | None
    examples: int
    examples_processed: int
    began: float  # perf_counter
    round_secs: float | None = None  # None: the next round has not begun
    eval: dict[str, float] | None = None
    herding: dict[str, float] | None = None
    consensus: dict[str, float] | None = None
    copies_sent: float = 0.0  # of the parameters, by all workers


_ASK_OF_SIGNAL = {
    None: agreement.Ask.NOTHING,
    signal.SIGINT: agreement.Ask.END_BY_SIGINT,
    signal.SIGTERM: agreement.Ask.END_BY_SIGTERM,
}


_NAME_OF_STOP = {
    agreement.Ask.END: "callback",
    agreement.Ask.END_BY_SIGINT: "SIGINT",
    agreement.Ask.END_BY_SIGTERM: "SIGTERM",
}


_SPARE_COPIES = 8  # of the parameters, that rounds may need beside what the first warm-up had
_LEAST_SPARE_BYTES, _MOST_SPARE_BYTES = 1 << 25, 1 << 29


class Loop:
    """One run. `run` does all of it; the methods below are its steps in order."""

    def __init__(
        self,
        parts: setup.RunParts,
        recorder: record.Recorder,
        evaluator: evaluate.Evaluator | None,
        callbacks: Sequence[Callback],
        *,
        started: float,
        keeper: "resume_lib.Keeper | None" = None,
    ) -> None:
        self._keeper = keeper
        self._parts, self._recorder = parts, recorder
        self._evaluator, self._callbacks = evaluator, callbacks
        self._config = parts.config
        self._num_workers = len(parts.devices)
        self._state = parts.state
        self._policy_state = parts.policy.init(self._num_workers, self._config.budget)
        self._keys: tuple[np.ndarray | None, list[jax.Array]] = (None, [])
        self._passes = np.zeros(self._num_workers, int)
        self._pending: _Round | None = None
        self._gathered = 0.0  # perf_counter, after the gathering of the last round
        self._tail_secs = 0.0  # of the last round, after its gathering
        self._asks = self._asked = agreement.Ask.NOTHING  # of this process; of all processes
        self._best_params: types.PyTree = None
        self._summary = summary.Summary(parts, started=started)
        self._carried: Any = None
        self._telemetry = telemetry.OrderTelemetry(parts)
        self._full_quotas: np.ndarray | None = None  # of the last round of the whole budget

    def run(self, start: resume_lib.Start) -> FitResult:
        """All rounds from there on; writes the files however they end."""
        stream, trace = self._parts.stream, self._parts.trace
        end = self._config.epochs * stream.num_examples
        with interrupt.deferred() as interrupted:
            self._warm_up()
            index = self._go_on(start)
            try:
                while stream.examples_processed < end:
                    if trace is not None and index >= len(trace):
                        print(
                            f"hetjax: the trace {self._config.replay!r} ends after {index} "
                            "rounds; so does this run, before its last epoch.",
                            file=sys.stderr,
                        )
                        break
                    self._asks |= _ASK_OF_SIGNAL[interrupted()]
                    if self._parts.agree.alone:
                        self._asked |= self._asks
                    if self._asked.ends:
                        break
                    self._round(index)
                    index += 1
                    self._save_if_due(index)
                self._report()
                self._summary.stopped_by = _NAME_OF_STOP.get(self._asked & ~agreement.Ask.SAVE)
                self._save(index)
            except NonFiniteError as error:
                error.result = self._result(interrupted=True)
                raise
            except Exception:
                with contextlib.suppress(ValueError):  # the first error is the cause
                    self._recorder.finish(self._summary.as_dict(interrupted=True))
                raise
            return self._result(interrupted=stream.examples_processed < end)

    def _result(self, *, interrupted: bool) -> FitResult:
        params = jax.device_get(self._params()[0])
        written = self._recorder.finish(self._summary.as_dict(interrupted=interrupted))
        best = params if self._best_params is None else self._best_params
        return FitResult(params, self._state, written, self._recorder.history, best)

    def _go_on(self, start: resume_lib.Start) -> int:
        """Takes up the run where it begins; the number of rounds that are done."""
        saved = start.saved
        if saved is None:
            return 0
        run, self._best_params = resume_lib.from_arrays(saved, self._as_saved(0), self._parts)
        self._state, self._policy_state = run.train, run.policy
        self._passes = run.passes
        self._full_quotas = run.full_quotas if run.full_quotas.any() else None
        self._carried = self._parts.begin(self._state)
        self._summary.restore(saved.about["summary"], start.lines)
        self._summary.examples_recomputed = start.examples_recomputed
        return run.rounds_done

    def _as_saved(self, rounds_done: int) -> resume_lib.RunState:
        full = self._full_quotas
        return resume_lib.RunState(
            self._state,
            self._policy_state,
            self._passes,
            np.zeros(self._num_workers, int) if full is None else full,
            rounds_done,
        )

    def _save_if_due(self, rounds_done: int) -> None:
        """Saves where the clock of process 0 asked for it, or the number of rounds says so."""
        every = self._config.checkpoint.every_rounds
        if agreement.Ask.SAVE in self._asked or (every and rounds_done % every == 0):
            self._save(rounds_done)
        self._asked &= ~agreement.Ask.SAVE
        self._asks &= ~agreement.Ask.SAVE
        if self._keeper is not None and self._keeper.is_due():
            self._asks |= agreement.Ask.SAVE

    def _save(self, rounds_done: int) -> None:
        """Keeps the run as it is; the run's clock stands still meanwhile."""
        if self._keeper is None:
            return
        self._settle()
        self._close_pending(time.perf_counter())
        self._report()
        stream = self._parts.stream
        self._parts.beacons.at("checkpointing", rounds_done)
        self._keeper.save(
            self._as_saved(rounds_done),
            self._best_params,
            finished=stream.examples_processed >= self._config.epochs * stream.num_examples,
            summary=self._summary.save(),
            examples_recomputed=self._summary.examples_recomputed,
        )

    def _settle(self) -> None:
        """Waits for the update, before a pause of the run's clock: it belongs to the round."""
        began = time.perf_counter()
        jax.block_until_ready(self._state)
        self._tail_secs += time.perf_counter() - began

    def _params(self) -> tuple[types.PyTree, dict[str, float] | None]:
        """The run's parameters on the own device, and how far the replicas are from them."""
        if self._parts.reducer.keeps_replicas_equal:
            return state_lib.own_row(self._state.params), None
        return state_lib.consensus(self._state, self._parts.own_device)

    def _warm_up(self) -> None:
        """Compiles and runs both phases for every worker, without effect, and untimed.

        Twice: what a round needs of memory lies elsewhere in the next, and is slow when new.
        """
        parts, nobody = self._parts, np.zeros(self._num_workers, bool)
        plan = local.warm_up_plan(self._num_workers, self._config.microbatch_size)
        self._carried = parts.begin(self._state)
        for is_second in (False, True):
            if is_second and parts.agree.on_one_machine and parts.own_device.platform == "cpu":
                self._touch_memory()
            began = time.perf_counter()
            result, _ = self._local_and_sync(None, plan, limits=plan.quotas, began=began)
            jax.device_get(result.metrics)
            if parts.new_pass is not None:
                self._state, self._carried = parts.new_pass(self._state, self._carried, nobody)
            jax.block_until_ready(self._state)
            self._tail_secs = time.perf_counter() - self._gathered
        params, _ = self._params()
        jax.block_until_ready(params)
        if parts.leads:
            self._summary.order_cost = self._telemetry.cost(params)

    def _touch_memory(self) -> None:
        """Takes more memory than there is yet, and gives it back; the launcher lets it be kept."""
        leaves = jax.tree.leaves(self._parts.state.params)
        copy = sum(leaf.nbytes for leaf in leaves) // self._num_workers
        wanted = _SPARE_COPIES * copy * len(self._parts.workers)
        np.ones(min(max(wanted, _LEAST_SPARE_BYTES), _MOST_SPARE_BYTES), np.uint8)

    def _local_and_sync(
        self, index: int | None, plan: rounds_lib.RoundPlan, *, began: float, **how: Any
    ) -> tuple[agreement.RoundResult, Any]:
        """The two phases, with the gathering between them: what all workers did, and the flips."""
        parts = self._parts
        own = parts.local.run(
            index,
            self._state,
            self._carried,
            plan,
            rngs=self._pass_keys(plan.passes),
            **how,
        )
        parts.sums.post(own.contributed)
        lead_secs = 0.0
        if parts.lead_is_own:
            lead_secs = self._tail_secs + time.perf_counter() - began - own.compute_secs.max()
        active = parts.active(index or 0)
        digests = agreement.digests_of(
            plan,
            index or 0,
            limits=how["limits"],
            active=active,
            may_close=how.get("may_close", True),
        )
        result = parts.agree(own, digests, self._asks, lead_secs)
        self._gathered = time.perf_counter()
        once = functools.partial(parts.agree.once, lead_secs=result.lead_secs)
        done = parts.sync(
            self._state,
            parts.sums.total(own.contributed, once),  # all have posted
            parts.shares,
            active,
            result.metrics,
        )
        self._state, self._carried = done.state, done.carried
        return result._replace(metrics=result.metrics or done.metrics), done.flips

    def _pass_keys(self, passes: np.ndarray) -> list[jax.Array]:
        """The key of each own worker's pass, on its device; made anew when a pass begins."""
        known, keys = self._keys
        if known is None or not np.array_equal(known, passes):
            rng, devices = self._parts.rng, self._parts.devices
            keys = [
                jax.device_put(jax.random.fold_in(rng, int(passes[worker])), devices[worker])
                for worker in self._parts.workers
            ]
            self._keys = (passes, keys)
        return keys

    def _assign(self, index: int, present: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(quotas, limits, caps)` of a round: by the policy, or as the trace has them."""
        stream, budget = self._parts.stream, self._config.budget
        caps = np.where(present, self._config.quota.max_microbatches or budget, 0)
        if self._parts.trace is None:
            total = stream.total(budget, gated=self._config.gate.trigger != "none")
            quotas, self._policy_state = self._parts.policy.assign(self._policy_state, total, caps)
            quotas = stream.fitted(quotas, present)
            return quotas, quotas, caps
        quotas, done = self._parts.trace[index]
        served = stream.fitted(quotas, quotas > 0)
        total = stream.total(budget)
        if quotas.sum() > total or np.any((quotas > caps) | (quotas > served) | (done > quotas)):
            raise ValueError(
                f"replay: round {index} of {self._config.replay!r} has quotas "
                f"{quotas.tolist()}, but here it has {total} microbatches, caps {caps.tolist()}; "
                "replay with the configuration that wrote it"
            )
        return quotas, done, caps

    def _round(self, index: int) -> None:
        parts, began = self._parts, time.perf_counter()
        parts.beacons.at("computing" if self._config.local == "fused" else "waiting", index)
        self._close_pending(began)
        present = (
            np.ones(self._num_workers, bool)
            if parts.cluster is None
            else parts.cluster.present_at(index)
        )
        quotas, limits, caps = self._assign(index, present)
        may_close = parts.trace is None and not parts.stream.is_last(quotas)
        closing = parts.pace.close(index, quotas) if may_close else None
        if closing is not None:
            limits = closing.microbatches_done
        epoch, before = parts.stream.epoch, parts.stream.examples_processed
        plan = parts.stream.plan(quotas)
        parts.feed.read_ahead(parts.stream.upcoming(quotas, parts.workers))
        self._begin_passes(plan, epoch)
        result, flips = self._local_and_sync(
            index, plan, began=began, limits=limits, may_close=may_close, meanwhile=self._report
        )
        self._asked |= result.ask
        if closing is not None:
            result = result._replace(
                compute_secs=closing.compute_secs, local_secs=float(closing.round_secs)
            )
        parts.stream.commit(plan, result.microbatches_done, _flipped(result.unit_signs, flips))
        if parts.trace is None:  # of a trace the policy was never asked
            self._policy_state = parts.policy.observe(self._policy_state, _times(result))
        if self._full_quotas is None or quotas.sum() == self._config.budget:
            self._full_quotas = quotas
        processed = parts.stream.examples_processed
        self._pending = _Round(
            index=index,
            epoch=epoch,
            plan=plan,
            result=result,
            present=present,
            full=int(quotas.sum()) == self._config.budget,
            references=self._summary.references(index, int(quotas.sum()), caps),
            examples=processed - before,
            examples_processed=processed,
            began=began,
            copies_sent=parts.reducer.copies_sent(parts.active(index)),
        )
        self._tail_secs = time.perf_counter() - self._gathered
        if parts.stream.epoch > epoch:
            self._end_epoch(parts.stream.epoch)

    def _begin_passes(self, plan: rounds_lib.RoundPlan, epoch: int) -> None:
        """Tells the order's device part which workers begin a new pass: all where they are
        coordinated, with the epoch; else each with its own pass."""
        observer, new_pass = self._parts.method.observer, self._parts.new_pass
        if observer is None or new_pass is None:
            return
        passes = np.full(self._num_workers, epoch) if observer.coordinated else plan.passes
        begins, self._passes = passes != self._passes, passes
        if begins.any():
            self._state, self._carried = new_pass(self._state, self._carried, begins)

    def _end_epoch(self, epochs_done: int) -> None:
        """Evaluates where due; the run's clock stands still meanwhile."""
        self._settle()
        self._close_pending(time.perf_counter())
        if self._pending is None:
            return
        params, self._pending.consensus = self._params()
        if self._full_quotas is not None and self._parts.leads:
            self._pending.herding = self._telemetry.herding(epochs_done, params, self._full_quotas)
        due = epochs_done % self._config.eval_every == 0 or epochs_done >= self._config.epochs
        if not due:
            return
        values = {} if self._evaluator is None else self._evaluated(self._evaluator, params)
        if not self._parts.reducer.keeps_replicas_equal:
            values |= self._worst(self._evaluator)
        if self._evaluator is None:
            return
        self._pending.eval = values
        if self._summary.evaluated(values):
            self._best_params = jax.device_get(params)

    def _evaluated(self, evaluator: evaluate.Evaluator, params: types.PyTree) -> dict[str, float]:
        return {f"test_{name}": value for name, value in evaluator(params).items()}

    def _worst(self, evaluator: evaluate.Evaluator | None) -> dict[str, float]:
        """The metrics of the replica with the highest loss; every process gives its replicas."""
        found = []
        for worker in range(self._num_workers):
            replica = state_lib.worker_row(self._state.params, worker)
            if evaluator is not None:
                found.append(evaluator(jax.device_put(replica, self._parts.own_device)))
        worst = max((f for f in found if "loss" in f), key=lambda f: f["loss"], default={})
        return {f"worst_test_{name}": value for name, value in worst.items()}

    def _close_pending(self, now: float) -> None:
        if self._pending is not None and self._pending.round_secs is None:
            secs = now - self._pending.began
            virtual = self._parts.virtual_clock
            self._pending.round_secs = self._pending.result.local_secs if virtual else secs

    def _report(self) -> None:
        """Reports the round before, whose numbers have arrived by now.

        Raises:
            NonFiniteError: a microbatch of it was not finite, and the run is to stop.
        """
        done, self._pending = self._pending, None
        if done is None:
            return
        metrics = jax.device_get(done.result.metrics)
        line = self._summary.round_done(done, metrics)
        self._recorder.add(line)
        bad = np.flatnonzero(metrics.nonfinite_microbatch >= 0)
        if bad.size and self._config.nonfinite == "stop":
            worker = int(bad[0])
            position = int(metrics.nonfinite_microbatch[worker])
            ids = done.plan.rows(worker)[position]
            raise NonFiniteError(
                f"round {done.index}: the loss or a gradient of worker {worker}'s microbatch "
                f"{position} is not finite (examples {ids[ids >= 0].tolist()}). The state "
                "before this round was kept. Lower the learning rate, clip gradients, look at "
                "these examples, or set nonfinite='skip' to leave such microbatches out"
            )
        if self._callbacks:
            self._parts.beacons.at("reporting", done.index)
        for callback in self._callbacks:
            if callback(line):
                self._asks |= agreement.Ask.END
        self._parts.beacons.at("waiting", done.index)


def _times(result: agreement.RoundResult) -> quota.RoundTimes:
    """What the policy is told: what a worker's process needs before its compute is its own too."""
    lead_secs = np.where(result.microbatches_done > 0, result.lead_secs, 0.0)
    return quota.RoundTimes(
        result.microbatches_done, result.first_secs + lead_secs, result.compute_secs + lead_secs
    )


def _flipped(unit_signs: list[Any] | None, flips: Any) -> list[np.ndarray] | None:
    """The unit signs of each worker, multiplied as the coordination says."""
    if unit_signs is None:
        return None
    flips = np.asarray(flips)  # i8[W], or i8[W, max_microbatches * B]
    return [
        signs * (flip if flip.ndim == 0 else flip[: signs.size].reshape(signs.shape))
        for signs, flip in zip(unit_signs, flips, strict=True)
    ]
