"""Rounds that add up: what the workers contribute, planned, computed, gathered and reduced.

An `Engine` knows no optimiser. `Run` is an engine and an update, a level of a bilevel problem is an
engine alone. Everything on the host that the rounds to come depend on is in a `RoundsState`.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np
import optax

from hetjax import compiled, executor, slices, starting, types
from hetjax import mesh as mesh_lib
from hetjax.comm import allgather_work, broadcast_once, join, runtime
from hetjax.comm import key_value_store as store_lib
from hetjax.config import experiment as config_lib
from hetjax.data import owned, sources, stream
from hetjax.inputs import agreement, arguments, fingerprint
from hetjax.inputs import refusals as inputs
from hetjax.liveness import blocking_waits, heartbeats
from hetjax.local import rules as rules_lib
from hetjax.local import stepped
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.rounds import build, planning, round_report, run_state, sync, warm_up
from hetjax.rounds import setup as setup_lib
from hetjax.rounds.run_state import Executed, Generations, Plan, RoundsState, RunState


class Engine:
    """Rounds that add up, one at a time.

    Args:
        loss_fn, source, workers, per_example_rng: as for `fit`.
        point: where the rules compute, such as parameters; without worker axis.
        rule: what a worker does with its microbatches; by default it adds up gradients.
        rules: of further kinds of rounds, by name; the policy learns each apart.
        config: a checked configuration; or give `fields`.
        solved: numbers that the run solved before it was interrupted, by problem.
        begins: told what goes on before the first round.
        beside: another engine, whose rounds take turns with this one's on the same workers.
        by_name: what the loss may ask for; None: what the scope has.
        optimizer: of a `Run`, whose rounds update.
        shard: as for `fit`.
        **fields: fields of the configuration, groups as dicts; parts as objects, names or dicts.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.
    """

    _end = ""  # a process's part of the data, within an epoch; what is to tell

    def __init__(
        self,
        loss_fn: losses_lib.LossFn,
        point: types.PyTree,
        source: Any,
        *,
        workers: int | None = None,
        per_example_rng: bool = False,
        rule: rules_lib.LocalRule | None = None,
        rules: Mapping[str, rules_lib.LocalRule] | None = None,
        config: config_lib.ExperimentConfig | None = None,
        solved: Callable[[], dict[str, broadcast_once.Numbers]] = dict,
        begins: starting.Starting | None = None,
        beside: "Engine | None" = None,
        by_name: named_lib.Beside | None = None,
        optimizer: optax.GradientTransformation | None = None,
        shard: Any = None,
        **fields: Any,
    ) -> None:
        join.check_joined()
        self.begins = begins or starting.Starting()
        point = mesh_lib.auto(point)
        inputs.check(loss_fn, point)
        given = arguments.configuration(
            config, fields, workers=workers, rule=rule, more=rules, shard=shard
        )
        debug = given.config.debug or executor.is_eager()
        self.config, self.recorded = dataclasses.replace(given.config, debug=debug), given.recorded
        compiled.keep(self.config.compilation_cache)
        source = sources.of_run(sources.as_source(source), owned.seed(self.config))
        self._given = loss_fn, point, optimizer, source
        self._is_guest = beside is not None
        self.heartbeats: heartbeats.Heartbeats = beside.heartbeats if beside else heartbeats.start()
        process = runtime.current()
        if beside is None:
            process.detector.follow(self.heartbeats)
        self.heartbeats.at("starting")
        several = process.num_processes > 1 and self.config.local != "virtual"
        if several:
            alike = owned.alike(source, self.config.data.sharing)
            agreement.check_same_run(self.recorded, alike, arguments.versions())
        store = store_lib.KeyValueStore("solutions") if several else None
        self.setup: setup_lib.Setup = build.build(
            *self._given,
            given=given._replace(config=self.config),
            shard=shard,
            several=several,
            per_example_rng=per_example_rng,
            more_rules=rules or {},
            heartbeats=self.heartbeats,
            solved=broadcast_once.BroadcastOnce(store, leads=process.is_first, kept=solved),
            begins=self.begins,
            by_name=by_name or named_lib.Beside(named_lib.current().frozen),
            communicator=None if beside is None else beside.setup.company.communicator,
        )
        setup = self.setup
        if several:
            agreement.check_same_parts(
                self.digests,
                holds_all=self.config.data.sharing == "shared",
                shards=(setup.stream.shards, setup.stream.shares),
                mixing=setup.methods.reducer.mixing,
                trace=setup.speeds.trace,
                first=setup.feed.first(),
            )
        self.num_workers = len(setup.where.devices)
        self.is_closed, self._opened = False, contextlib.ExitStack()
        self.warm: dict[str, run_state.Shapes] = {}
        """The kinds of rounds whose programs have run, and what these are given."""
        self._pass_keys = stepped.pass_keys(setup.rng, setup.where)
        self.clock = round_report.HostClock()
        self._last_made: types.PyTree = None  # by the last round
        is_alone, nothing = setup.company.communicator.alone, contextlib.nullcontext
        self.waiting: Any = nothing() if is_alone else blocking_waits.Wait("synchronise")
        """Around the synchronisation, which waits for other processes."""
        # Around what all processes do together.
        self.together = nothing if is_alone else process.detector.taking_part

    @functools.cached_property
    def digests(self) -> dict[str, Any]:
        """Of what the rounds depend on beside the configuration, by name; JSON values."""
        setup = self.setup
        more = setup.programs.main.rule, setup.per_example_rng, setup.by_name
        with slices.seen(setup.where.layout, alike=True):
            made = fingerprint.make(*self._given, self.config, *more)
        return fingerprint.of_parts(made, setup.feed.own)

    def __enter__(self) -> Self:
        self._opened.enter_context(compiled.shared())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            runtime.current().detector.left(error)
        self._opened.close()
        self.close()

    def close(self) -> None:
        """Frees threads; no round can be run any more."""
        self.is_closed = True
        self.setup.close()
        if not self._is_guest:
            self.heartbeats.close()

    def begin(self) -> RoundsState:
        """Before the first round."""
        policies, stream = planning.begun_policies(self.setup), self.setup.stream.init()
        return RoundsState(policies, stream, np.zeros(self.num_workers, int), Generations(self))

    def is_complete(self, state: RoundsState | RunState) -> bool:
        """Whether as many examples are processed as the epochs have, or `max_rounds` are done."""
        of_epochs = self.config.epochs * self.setup.stream.examples_per_epoch
        is_over = state.stream.examples_processed >= of_epochs
        return is_over or 0 < self.config.max_rounds <= state.rounds_done

    def is_end_of_trace(self, state: RoundsState | RunState) -> bool:
        """Whether the trace that is replayed has no more rounds."""
        trace = self.setup.speeds.trace
        return trace is not None and state.rounds_done >= len(trace)

    def end_of_source(self, state: RoundsState | RunState) -> str:
        """Where an iterable has ended within an epoch, and all that came is done: what to tell."""
        rounds = state.rounds if isinstance(state, RunState) else state
        feed, stream = self.setup.feed, self.setup.stream
        return feed.end(stream, rounds.stream, self.config.budget) if feed.reads_all else self._end

    def sum(
        self,
        state: RoundsState,
        point: types.PyTree,
        *,
        kind: str = setup_lib.MAIN,
        given: types.PyTree = (),
        again: stream.Assignment | None = None,
        request: allgather_work.Request = allgather_work.Request.NOTHING,
    ) -> tuple[RoundsState, sync.Synchronised, round_report.Report]:
        """One round that adds up, of a rule that keeps nothing.

        Args:
            state: from `begin` or the round before; it is spent.
            point: where the rule computes, leaves `[W, ...]`.
            kind, given, again, request: as of `Run.round`.

        Returns:
            the next state; what was added up, as `mean` and `own`; the report.

        Raises:
            ValueError: the state is spent, or another engine's; nothing was computed.
            NonFiniteError: a microbatch of the round before was not finite.
        """
        run_state.check_state(state, self)
        if kind not in self.warm:
            warm_up.of_sums(self, state, point, kind, given)
        plan = self.open(state, kind=kind, given=given, again=again)
        with jax.profiler.StepTraceAnnotation("round", step_num=plan.local.round_index):
            executed = self.add_up(plan, point, types.Kept(), request=request)
            new, report = self.close_round(executed)
        return new, executed.sums, report

    # --- What a round is made of ---

    def open(
        self,
        state: RoundsState | RunState,
        *,
        kind: str,
        given: types.PyTree,
        again: stream.Assignment | None,
    ) -> Plan:
        """What the next round is to do, which begins now: with it the last one ends.

        Args:
            state: that it spends.
            kind, given, again: as of `Run.round`.

        Raises:
            ValueError: the state is spent, or another run's; `given` or the trace does not fit.
        """
        rounds, setup = run_state.check_state(state, self), self.setup
        self.heartbeats.at("waiting")
        setup.company.communicator.start_barrier(state)
        setup.feed.compare(setup.stream.epoch(rounds.stream))
        began = time.perf_counter()
        at = "computing" if self.config.local == "fused" else "waiting"
        self.heartbeats.at(at, rounds.rounds_done)
        if (shapes := self.warm[kind]) or jax.tree.leaves(given):
            run_state.check_given(given, shapes)
        if again is None and (ended := self.end_of_source(rounds)):
            raise ValueError(ended)
        plan = planning.plan(setup, rounds, kind=kind, given=given, again=again)
        if setup.feed.reads_ahead and again is None:
            workers = range(self.num_workers) if setup.feed.reads_all else setup.where.own
            setup.feed.read_ahead(*setup.stream.upcoming(rounds.stream, plan.quotas, workers))
        self.clock.begins(began)
        return plan

    def close_round(self, executed: Executed) -> tuple[RoundsState, round_report.Report]:
        """What the rounds to come depend on after a round, and its report."""
        plan, sums = executed.plan, executed.sums
        new = planning.commit(self.setup, plan, executed)
        processed = new.stream.examples_processed
        examples = processed - plan.rounds.stream.examples_processed
        if plan.is_again:
            examples = int(np.sum(plan.local.assigned.example_ids >= 0))
        report = round_report.Report(
            self.setup,
            executed,
            settle=self.settle,
            state_of=lambda report: self._last_made[0] if report is self.clock.last else None,
            began=self.clock.round_began,
            examples=examples,
            examples_processed=processed,
        )
        if self.clock.last is None:
            report.check_reducer(sums)
        self.clock.last, self._last_made = report, (sums.state, sums.mean, sums.own)
        self.clock.closes()
        return new, report

    def add_up(self, plan: Plan, point: types.PyTree, kept: types.Kept, **options: Any) -> Executed:
        """A round without update, at a point with leaves `[W, ...]`; `options` are of `compute`."""
        carried = plan.programs.begin(point, kept, plan.given)
        with self.together():
            return self.phases(plan, (kept, point, carried), plan.given, **options)

    def phases(self, plan: Plan, begun: tuple, given: types.PyTree, **options: Any) -> Executed:
        """Both phases of a round; all processes call it together.

        Args:
            plan: from `open`, or of a warm-up.
            begun: what `compute` takes behind it; used up.
            given: values of the round that begins where this one ends.
            **options: of `compute`.
        """
        taken, work, asked = self.compute(plan, *begun, **options)
        with self.waiting:
            sums = plan.programs.sync.call(*taken, given)
        return Executed(plan, work(), sums._replace(metrics=taken[-1] or sums.metrics), asked)

    def compute(
        self,
        plan: Plan,
        kept: Any,
        point: types.PyTree,
        carried: types.Carried,
        *,
        request: allgather_work.Request = allgather_work.Request.NOTHING,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[tuple[Any, ...], Callable[[], types.Work], allgather_work.Request]:
        """The local phase of a round, and what all processes tell each other of it.

        Args:
            plan: from `open`; its state is spent.
            kept: what the sync phase begins from: a `TrainState`, or `Kept` without an update.
            point: where the rules compute, leaves `[W, ...]`.
            carried: by the workers, begun at the point; used up.
            request: what this process asks of all of them.
            meanwhile: called while the workers compute.

        Returns:
            what the synchronisation takes, but for what the next round is given; what waits for the
            workers and says what they did; and what any process asked.

        Raises:
            NonFiniteError: a microbatch of the round before was not finite.
        """
        setup, own, clock = self.setup, plan.programs, self.clock
        begins = plan.passes != plan.rounds.passes
        if setup.new_pass is not None and begins.any():
            memory, carried = setup.new_pass(kept.memory, carried, begins)
            kept = kept._replace(memory=memory)
        shared = types.shared(point, plan.given, kept, setup.frozen)
        plan.rounds.generations.newest = plan.rounds.generation + 1

        def once_begun() -> None:
            clock.computes()
            if meanwhile is not None:
                meanwhile()
            if clock.last is not None and plan.local.round_index is not None:
                clock.last.check()

        setup.company.communicator.begins(plan.local.round_index, point)
        rngs, local = self._pass_keys(plan.local.assigned.passes), plan.local
        limits = setup.feed.limits(local.assigned, local.limits)
        if limits is not local.limits and (limits < local.limits).any():
            local, request = local._replace(limits=limits), request | allgather_work.Request.NO_DATA
        contributed, measured = own.local.run(local, shared, carried, rngs, once_begun)

        def here() -> types.Work:
            work = measured()
            clock.stamp("computed")
            return work

        if plan.local.round_index is None:
            self.begins.detail("the synchronisation")
        metrics: types.SyncMetrics | tuple[()] = ()
        done = here
        if setup.company.gather is not None:
            work = here()
            own.sums.post(contributed)
            clock.stamp("posted")
            is_known = own.sums.meet_before and setup.host_is_own
            host_secs = clock.host_secs(work.compute_secs.max()) if is_known else 0.0
            told = run_state.digests_of(plan.local, plan.active), request, host_secs
            work, request, metrics = setup.company.gather(contributed, work, *told)
            clock.stamp("gathered")
            contributed = own.sums.total(contributed, work.host_secs)  # all have posted
            done = lambda: work  # noqa: E731

        if allgather_work.Request.NO_DATA in request:
            self._end = "the data of a process have ended within its epoch"

        def timed() -> types.Work:
            work = done()
            if (closing := plan.closing) is not None:
                work = work._replace(compute_secs=closing.compute_secs)
            local_secs = work.compute_secs.max() if closing is None else closing.round_secs
            return work._replace(local_secs=float(local_secs))

        return (kept, contributed, setup.shares, plan.active, metrics), timed, request

    def settle(self) -> None:
        """Waits for the last update, which belongs to its round, and ends that round.

        Call it before a pause: the run's clock stands still from there to the next round.
        """
        if self.clock.last is None:
            return
        since = time.perf_counter()
        with blocking_waits.Wait("synchronise", is_vain=False):  # they may be at their exit by then
            jax.block_until_ready(self._last_made)
        self.clock.settled(since)

    def warmed_up(self, kind: str, given: types.PyTree) -> None:
        """Notes that a kind is warm; its rounds are given values of these shapes."""
        self.clock.closes()
        self.warm[kind] = run_state.shapes_of(given)
