"""What a round tells: its line, and a report whose numbers may still be on the devices.

A `Report` is read when a number is asked for; `read` waits for it then and makes the
`RoundReport`, the line of `metrics.jsonl`. So the host can say what a round did while the next one
computes.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hetjax import executor, reported, trees, types
from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax.comm import key_value_store as store_lib
from hetjax.data import stream
from hetjax.local import nonfinite, packing
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.losses import weighting as weighting_lib
from hetjax.rounds import planning, programs, run_state, sync
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import state as state_lib

_PATIENCE_SECS = 60.0
_MOMENTS = ("computed", "posted", "gathered")  # of a round


class NonFiniteError(ValueError):
    """A microbatch's loss or gradient was not finite, and `nonfinite='stop'`.

    Attributes:
        result: the `FitResult` up to the round before it, whose state was kept; only from `fit`.
    """

    result: Any


class Report:
    """A round that is done. `read()` waits for it, and has the numbers; nothing else does.

    The round ends when the next one begins. A report that is read before ends it at once.

    Args:
        setup: of the run.
        settle: waits until the round is over, and calls `end`.
        state_of: what a round left, of its report; None where it is not known any more.
        executed: what came of it.
        began: perf_counter when the host began with it.
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
        began: float,
        examples: int,
        examples_processed: int,
    ) -> None:
        nothing: Any = None  # a report holds no state: its buffers are the next round's
        self._setup, self._plan = setup, executed.plan._replace(rounds=nothing)
        self._epoch, self._began = setup.stream.epoch(executed.plan.rounds.stream), began
        self._work = executed.work
        self._metrics, self._step_norms = executed.sums.metrics, executed.sums.step
        for leaf in jax.tree.leaves((self._metrics, self._step_norms)):
            if isinstance(leaf, jax.Array):  # on its way to the host before any wait for it
                leaf.copy_to_host_async()
        self.asked, self._changes = executed.asked, setup.company.communicator.changes
        self._settle, self._state_of = settle, state_of
        self._examples, self._examples_processed = examples, examples_processed
        self._round_secs: float | None = None
        self._exchange_secs: float | None = None
        self._line: reported.RoundReport | None = None

    @property
    def done(self) -> stream.Assignment:
        """The microbatches that were done, for `Run.round(..., again=…)`; without waiting."""
        return stream.done_of(self._plan.local.assigned, self._work.microbatches_done)

    def end(self, now: float) -> None:
        """Says when the round was over, unless that is known already."""
        if self._round_secs is None:
            virtual = self._setup.speeds.clock.virtual
            self._round_secs = self._work.local_secs if virtual else now - self._began

    def exchanged(self, secs: float) -> None:
        """Says how long sums, mixing and update took, unless that is known already."""
        if self._exchange_secs is None and not self._setup.speeds.clock.virtual:
            self._exchange_secs = secs

    @functools.cached_property
    def references(self) -> planning.References | None:
        """None where the true speeds are not known, or a gate may close the round."""
        return planning.references(self._setup, self._plan)

    @functools.cached_property
    def totals(self) -> types.SyncMetrics:
        """The sums of the round, on the host; waits for them. NaN is the loss of a rule that adds
        up none."""
        totals: types.SyncMetrics = packing.unpack(jax.tree.map(np.asarray, self._metrics))
        if self._plan.programs.rule.reads.loss_sum is None:
            nothing: Any = np.float64(np.nan)
            totals = totals._replace(loss_sum=nothing)
        return totals

    @property
    def divisor(self) -> float:
        """What the sums of the round were divided by; 0 or less: no update was made of them.

        The sum of the weights, or with `weighting=shard` of each worker's in the measure of its
        shard. Where each worker divides by its own number, the largest.
        """
        totals, config = self.totals, self._setup.config
        is_sum = (totals.worker_weights[totals.example_count > 0] > 0).all()
        if is_sum and not totals.counts:
            return float(totals.weight_sum)
        gossips = self._setup.methods.reducer.mixing is not None
        found = weighting_lib.counting(
            programs.weighting(config, gossips=gossips),
            totals,
            jax.numpy.asarray(self._setup.stream.shares),
            added_up=not gossips,
            nominal=programs.nominal_examples(config) / len(self._setup.where.devices),
            by_share=self._plan.programs.rule.traits.by_share,
        )
        return float(np.max(found.divisor))

    def _step(self) -> dict[str, Any]:
        """How far the update went, of what is known and finite; {} where there was no update."""
        step = self._step_norms
        mine = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], step)
        if not (found := packing.unpack(mine)):
            return {}
        values = {name: float(x) for name, x in found.values.items()}
        numbers = {name: float(x or 0) for name, x in found._replace(values=0)._asdict().items()}
        numbers = {name: x for name, x in numbers.items() if not math.isnan(x)}
        return numbers | {"values": values or None}

    def read(self) -> reported.RoundReport:
        """All of it on the host; waits for it.

        Raises:
            RuntimeError: the devices did other microbatches than the clocks saw.
        """
        if self._line is None:
            if self._round_secs is None:
                self._settle()
                self.end(time.perf_counter())
            self._line = executor.moving(self._read)()
        return self._line

    def check(self) -> None:
        """Waits for the round.

        Raises:
            NonFiniteError: a microbatch of it was not finite, and the run is to stop.
            ValueError: the weight that a rule of the user's makes is not finite, or microbatches
                changed an integer of the model's state unlike one another.
        """
        setup, plan, index = self._setup, self._plan, self._plan.local.round_index
        for name in (name for name, is_unlike in dict(self.totals.unlike).items() if is_unlike):
            raise ValueError(
                f"round {index}: the microbatches changed {name} of the "
                f"model's state unlike one another. state_reduce={{{name!r}: 'sum'}} adds up the "
                "changes of integers over microbatches; a mean of others needs floating point"
            )
        bad = np.flatnonzero(self.totals.nonfinite_microbatch >= 0)
        if not bad.size or setup.config.nonfinite != "stop":
            of_rule = self.totals.counts or [self.totals.worker_weights]
            weights = np.asarray(of_rule[0])  # what is skipped is in none of them
            for each in np.flatnonzero(~np.isfinite(weights)):
                finish = parts_lib.path_of(plan.programs.rule.finish)
                raise ValueError(
                    f"rule: finish, {finish}, returned the weight {weights[each]} of worker "
                    f"{each} in round {index}; it must be finite"
                )
            return
        worker = int(next((w for w in bad if w in setup.where.own), bad[0]))
        position = int(self.totals.nonfinite_microbatch[worker])
        rows = plan.local.assigned.microbatches(worker)[: position + 1]
        told = f"{self._cause(worker, rows)} ".lstrip()
        is_given = nonfinite.COMES in told
        way = "Make that finite" if is_given else "Lower the learning rate or clip gradients"
        is_one_sum = setup.programs.embedding is not None  # over the examples of all workers
        if plan.programs.updates and not is_one_sum:  # else others go on from the sum
            way += ", or set nonfinite='skip' or 'skip_update'"
        raise NonFiniteError(
            f"round {index}: the loss or a gradient of worker {worker}'s microbatch {position} is "
            f"not finite (examples {nonfinite.shown(rows[-1])}). {told}{way}"
        )

    def _cause(self, worker: int, rows: np.ndarray) -> str:
        """As of `nonfinite.cause`; "" where the round's state is not known any more.

        The worker's own process finds it for all.
        """
        company = self._setup.company
        of_all = None if company.gather is None else store_lib.KeyValueStore("nonfinite")
        if worker in self._setup.where.own:
            text = self._own_cause(worker, rows)
            if of_all is not None:
                of_all.post(str(worker), text)
            return text
        assert of_all is not None
        process = int(company.communicator.process_of[worker])
        try:
            return of_all.wait(str(worker), _PATIENCE_SECS, what="repeat a microbatch", by=process)
        except TimeoutError:
            return f"Process {process} can tell by which operation."

    def _own_cause(self, worker: int, rows: np.ndarray) -> str:
        setup, plan, state = self._setup, self._plan, self._state_of(self)
        if not isinstance(state, types.TrainState):
            return ""
        of_worker = state.params, state.kept._replace(memory=())
        own = setup.where.rows(of_worker)[setup.where.own.index(worker)]
        params, kept = trees.first_row(own)
        (frozen,) = mesh_lib.copies(setup.frozen, [setup.where.places[worker]])
        pass_index = int(plan.local.assigned.passes[worker])
        shared = types.shared(params, plan.given, kept, frozen)
        of_slice = setup.where.layout and setup.where.places[worker].mesh
        seen = jax.set_mesh(of_slice) if of_slice else contextlib.nullcontext()
        with named_lib.scope(shared.named), seen:
            return nonfinite.cause(
                plan.programs.rule,
                lambda ids: setup.feed.load(worker, ids, pass_index),
                rows,
                shared=shared,
                kept=kept.worker,
                rng=jax.random.fold_in(setup.rng, pass_index),
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
                f"{reducer.name}: it made NaN of finite sums; its collective and array must return "
                "finite ones"
            )

    def _read(self) -> reported.RoundReport:
        plan, metrics = self._plan, self.totals
        work, present = self._work, plan.caps > 0
        if not np.array_equal(metrics.microbatches_done, work.microbatches_done):
            raise RuntimeError(
                f"round {plan.local.round_index}: sums hold {metrics.microbatches_done} "
                f"microbatches, clocks saw {work.microbatches_done}"
            )
        loss_sum, weight_sum = np.float64(metrics.loss_sum), np.float64(metrics.weight_sum)
        busy_secs = work.compute_secs + work.host_secs
        longest = max(work.local_secs, float(busy_secs.max()))  # as `summary.longest_secs`
        waiting = (longest - busy_secs)[present]
        methods = self._setup.methods
        step = self._step()
        counted = 0 if step.pop("left_out", 0) else int(metrics.example_count.sum())
        sent, added = plan.programs.sums.copies(int(present.sum()))
        if methods.reducer.mixing is not None:
            sent, added = methods.reducer.copies_sent(plan.active), 0
        of_one, of_sum = self._setup.bytes_sent
        observer = methods.observer if plan.signed else None
        of_signs = 0 if observer is None else of_sum * observer.copies_sent
        return reported.RoundReport.of(
            round=plan.local.round_index or 0,
            epoch=self._epoch,
            examples=self._examples,
            examples_processed=self._examples_processed,
            skipped_examples=self._examples - counted,
            loss=float(loss_sum / weight_sum) if weight_sum > 0 else float("nan"),
            quotas=plan.quotas.tolist(),
            microbatches_done=work.microbatches_done.tolist(),
            examples_counted=metrics.example_count.tolist(),
            present=present.tolist(),
            changes=list(self._changes) or None,
            compute_secs=work.compute_secs.tolist(),
            start_secs=0.0,
            local_secs=work.local_secs,
            round_secs=self._round_secs or 0.0,
            waiting_fraction=float(waiting.mean() / longest) if longest > 0 else 0.0,
            full=int(plan.quotas.sum()) == self._setup.config.budget,
            overruns=int(work.overruns.sum()),
            optimal_round_secs=None if self.references is None else self.references.optimal_secs,
            host_secs=work.host_secs.tolist() if work.host_secs.any() else None,
            exchange_secs=self._exchange_secs,
            metrics=losses_lib.means(metrics.metric_sums) or None,
            **step,
            weight_sum=self.divisor if self._examples and self.divisor <= 0 else None,
            bytes_sent=round(sent * of_one + added * of_sum + of_signs),
            bytes_of_sums=round(added * of_sum),
        )


class HostClock:
    """When the rounds of an engine begin and end, by this process's clock.

    A round ends when the next one begins, or is settled before a pause. Its exchange goes from the
    end of the local phase to the beginning of the next one, less the gathering, which waits for the
    slowest worker. What the host needs between two local phases is no time of its workers'
    computing. Its moments are called in the order in which they stand here.
    """

    def __init__(self) -> None:
        self.last: Report | None = None
        """Of the round before, which may not be over yet."""
        self.round_began = self._began = time.perf_counter()
        self._at = dict.fromkeys(_MOMENTS, self._began)
        self._tail_secs = 0.0  # of the last round, after its gathering

    def begins(self, began: float) -> None:
        """A round began then; the last one ended with it."""
        self.round_began = self._began = began
        if self.last is not None:
            self.last.end(began)

    def stamp(self, moment: str) -> None:
        """Notes when the local phase was over (`computed`), when what the workers contributed was
        where the others find it (`posted`), and when all knew what all have done (`gathered`).
        Where there is no other process the first is all of them."""
        self._at |= dict.fromkeys(_MOMENTS[_MOMENTS.index(moment) :], time.perf_counter())

    def computes(self) -> None:
        """The workers have begun: what they begin with, the last round's exchange has made."""
        if self.last is not None:
            computed, posted, gathered = self._at.values()
            self.last.exchanged(time.perf_counter() - gathered + posted - computed)

    def host_secs(self, longest_secs: float) -> float:
        """What the host needed since the last gathering, beside its longest worker."""
        return self._tail_secs + self._at["posted"] - self._began - longest_secs

    def closes(self) -> None:
        """The host has done what it does after the gathering; a pass may follow, or a round."""
        self._began = time.perf_counter()
        self._tail_secs = self._began - self._at["gathered"]

    def settled(self, since: float) -> None:
        """The last round is over; the host waited for it since then."""
        assert self.last is not None
        now = time.perf_counter()
        self._tail_secs += now - since
        self.computes()
        self.last.end(now)
