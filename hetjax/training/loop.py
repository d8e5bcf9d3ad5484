"""The training loop: rounds of local and sync phases until the epochs are done.

`fit` is the one seam that the command line, a notebook and a test share. The loop knows no
policy, order, reducer or gate by name: `setup` builds them, records pass between them. While
the workers compute a round, the host reports the one before.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hetjax import config as config_lib
from hetjax import quota, types
from hetjax.cluster import beacons as beacons_lib
from hetjax.data import rounds as rounds_lib
from hetjax.data import sources
from hetjax.training import accumulate as accumulate_lib
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


def fit(
    loss_fn: accumulate_lib.LossFn,
    params: types.PyTree,
    optimizer: optax.GradientTransformation,
    source: Any,
    *,
    eval_source: Any = None,
    metrics_fn: evaluate.MetricsFn | None = None,
    callbacks: Sequence[Callback] = (),
    workdir: str | pathlib.Path | None = None,
    resume: bool = True,
    progress: bool = True,
    per_example_rng: bool = False,
    config: config_lib.ExperimentConfig | None = None,
    **fields: Any,
) -> FitResult:
    """Trains a model of your own on workers that are not equal.

    Args:
        loss_fn: `(params, examples, rng) -> losses f32[B]`, one number an example, or
            `(losses, weights)`: the objective is `sum(weights * losses) / sum(weights)` over
            the round. `hetjax.nnx_loss` and `hetjax.linen_loss` make one from a Flax model.
        params: a pytree of arrays.
        optimizer: any optax optimiser; gradient clipping in its chain acts on the gradient of
            the whole round. Schedules: `hetjax.scale_by_progress`.
        source: the examples: a dict of NumPy arrays, or anything with `__len__` and
            `__getitem__`.
        eval_source: evaluated every `eval_every` epochs; same form.
        metrics_fn: `(params, examples) -> {name: f32[B]}` for it. The best parameters are those
            of the lowest `loss` there, if it has one. By default the training loss, with
            dropout if that has any; `hetjax.nnx_metrics` and `linen_metrics` evaluate without.
        callbacks: called with each `RoundReport` while the next round computes; True ends the
            run after that one.
        workdir: gets `config.json`, `metrics.jsonl`, `summary.json`, `report.html` and
            `checkpoints`; those of a finished run of the same configuration are replaced.
        resume: go on from the newest checkpoint in `workdir` where there is one of this
            configuration that is not at the run's end; else begin at the beginning. The number
            of workers may have changed.
        progress: show a progress bar.
        per_example_rng: the loss gets a key for each example, `key[B]`.
        config: a checked configuration; or give `fields`.
        **fields: fields of the configuration, groups as dicts: `epochs=5, budget=32,
            cluster={"num_workers": 4}, quota={"policy": "adaptive"}`. By default there is a
            worker for each device.

    Returns:
        Last and best parameters, state, summary and history. After Ctrl-C too:
        `summary["interrupted"]` is true then.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
        NonFiniteError: a loss or gradient was not finite; its `result` holds the state before.

    Example:
        >>> import numpy as np, optax
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}
        >>> def loss_fn(params, batch, rng):
        ...     return (batch["x"] @ params - batch["y"]) ** 2
        >>> result = fit(
        ...     loss_fn, np.zeros(3, np.float32), optax.sgd(0.2), data, epochs=40,
        ...     microbatch_size=4, budget=4, cluster={"num_workers": 1}, progress=False,
        ... )
        >>> np.round(result.params, 2).tolist()
        [1.0, -2.0, 3.0]

    References:
        Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
        environment", 2021, arXiv 2111.08272. The quotas' cost model, exact solver and change
        detection are hetjax's own.
    """
    setup.check_arguments(params, optimizer, callbacks)
    source = sources.as_source(source)
    eval_source = None if eval_source is None else sources.as_source(eval_source)
    if config is None:
        config = setup.config_of_fields(fields)
        recorded = setup.recorded_fields(config)
    elif fields:
        raise ValueError(f"fit: give either config or fields, not both: {sorted(fields)}")
    else:
        recorded = config_lib.to_dict(config)
    started = time.perf_counter()
    beacons = beacons_lib.start()
    beacons.at("starting")
    parts = setup.build(
        loss_fn,
        params,
        optimizer,
        source,
        config=config,
        per_example_rng=per_example_rng,
        beacons=beacons,
    )
    if not parts.agree.alone:
        agreement.check_same_run(recorded, num_examples=len(source), leads=parts.leads)
    evaluator = None
    if eval_source is not None and parts.leads:
        metrics_fn = metrics_fn or evaluate.metrics_of_loss(loss_fn)
        evaluator = evaluate.Evaluator(
            metrics_fn,
            eval_source,
            params,
            parts.own_device,
            on_batch=lambda: beacons.at("evaluating"),
        )
    workdir = None if workdir is None else pathlib.Path(workdir)
    restarted = int(os.environ.get("HETJAX_ATTEMPT", "0")) > 0
    with contextlib.ExitStack() as stack:
        stack.callback(beacons.close)
        stack.callback(parts.close)
        start = resume_lib.find(workdir, recorded, parts=parts, resume=resume, restarted=restarted)
        keeper = None
        if workdir is not None:
            keeper = stack.enter_context(contextlib.closing(resume_lib.Keeper(workdir, parts)))
        recorder = record.Recorder(
            workdir if parts.leads else None,
            recorded,
            num_examples=config.epochs * len(source),
            progress=progress and parts.leads,
            lines=start.lines,
        )
        stack.callback(recorder.close)
        loop = _Loop(parts, recorder, evaluator, callbacks, started=started, keeper=keeper)
        return loop.run(start)


@dataclasses.dataclass
class _Round:
    """A round that is done and not reported yet: its numbers may still be on the devices."""

    index: int
    epoch: int
    plan: rounds_lib.RoundPlan
    result: agreement.RoundResult
    metrics: types.SyncMetrics
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


class _Loop:
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
        self._asks = self._asked = agreement.Ask.NOTHING  # of this process; of all processes
        self._best_params: types.PyTree = None
        self._summary = summary.Summary(parts, started=started)
        self._accumulated: Any = None
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
        if self._parts.new_pass is not None:
            nobody = np.zeros(self._num_workers, bool)
            self._state, self._accumulated = self._parts.new_pass(
                self._state, self._accumulated, nobody
            )
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
        jax.block_until_ready(self._state)
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

    def _params(self) -> tuple[types.PyTree, dict[str, float] | None]:
        """The run's parameters on the own device, and how far the replicas are from them."""
        if self._parts.reducer.keeps_replicas_equal:
            return state_lib.own_row(self._state.params), None
        return state_lib.consensus(self._state, self._parts.own_device)

    def _warm_up(self) -> None:
        """Compiles and runs both phases for every worker, without effect, and untimed."""
        plan = local.warm_up_plan(self._num_workers, self._config.microbatch_size)
        result = self._parts.local.run(
            None,
            self._state,
            self._parts.local.fresh(),
            plan,
            rngs=self._pass_keys(plan.passes),
            limits=plan.quotas,
        )
        digest = agreement.digest_of(plan, 0)
        self._parts.agree(result, digest, agreement.Ask.NOTHING)
        self._state, self._accumulated, metrics, _ = self._parts.sync(
            self._state, result.accumulated, self._parts.shares, self._parts.active(0)
        )
        jax.device_get(metrics)
        params, _ = self._params()
        jax.block_until_ready((self._state, params))
        parts = self._parts
        if parts.new_pass is not None:
            nobody = np.zeros(self._num_workers, bool)
            self._state, self._accumulated = parts.new_pass(self._state, self._accumulated, nobody)
        if parts.leads:
            self._summary.order_cost = self._telemetry.cost(params)

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
        active = parts.active(index)
        epoch, before = parts.stream.epoch, parts.stream.examples_processed
        plan = parts.stream.plan(quotas)
        parts.feed.read_ahead(parts.stream.upcoming(quotas, parts.workers))
        self._begin_passes(plan, epoch)
        own = parts.local.run(
            index,
            self._state,
            self._accumulated,
            plan,
            rngs=self._pass_keys(plan.passes),
            limits=limits,
            may_close=may_close,
            meanwhile=self._report,
        )
        result = parts.agree(own, agreement.digest_of(plan, index), self._asks)
        self._asked |= result.ask
        if closing is not None:
            result = result._replace(
                compute_secs=closing.compute_secs, local_secs=float(closing.round_secs)
            )
        self._state, self._accumulated, metrics, turns = parts.sync(
            self._state, own.accumulated, parts.shares, active
        )
        parts.stream.commit(plan, result.microbatches_done, _turned(result.unit_signs, turns))
        self._policy_state = parts.policy.observe(
            self._policy_state,
            quota.RoundTimes(result.microbatches_done, result.first_secs, result.compute_secs),
        )
        if self._full_quotas is None or quotas.sum() == self._config.budget:
            self._full_quotas = quotas
        processed = parts.stream.examples_processed
        self._pending = _Round(
            index=index,
            epoch=epoch,
            plan=plan,
            result=result,
            metrics=metrics,
            present=present,
            full=int(quotas.sum()) == self._config.budget,
            references=self._summary.references(index, int(quotas.sum()), caps),
            examples=processed - before,
            examples_processed=processed,
            began=began,
            copies_sent=parts.reducer.copies_sent(active),
        )
        if parts.stream.epoch > epoch:
            self._end_epoch(parts.stream.epoch)

    def _begin_passes(self, plan: rounds_lib.RoundPlan, epoch: int) -> None:
        """Tells the order's device part which workers begin a new pass: all where they are
        coordinated, with the epoch; else each with its own pass."""
        signs, new_pass = self._parts.method.signs, self._parts.new_pass
        if signs is None or new_pass is None:
            return
        passes = np.full(self._num_workers, epoch) if signs.coordinated else plan.passes
        begins, self._passes = passes != self._passes, passes
        if begins.any():
            self._state, self._accumulated = new_pass(self._state, self._accumulated, begins)

    def _end_epoch(self, epochs_done: int) -> None:
        """Evaluates where due; the run's clock stands still meanwhile."""
        jax.block_until_ready(self._state)
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
        metrics = jax.device_get(done.metrics)
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


def _turned(unit_signs: list[Any] | None, turns: Any) -> list[np.ndarray] | None:
    """The unit signs of each worker, turned round where the coordination says so."""
    if unit_signs is None:
        return None
    turns = np.asarray(turns)  # i8[W], or i8[W, max_microbatches * B]
    return [
        signs * (turn if turn.ndim == 0 else turn[: signs.size].reshape(signs.shape))
        for signs, turn in zip(unit_signs, turns, strict=True)
    ]
