"""A run that steps: one round goes in as a state and comes out as the next one.

`plan` says what a round is to do, `execute` does it, `commit` makes the next state of what was
done; `round` is the three of them. `plan` and `commit` have no effects. Everything that the rounds
to come depend on is in the state; `Run` holds what never changes.
"""

import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from hetjax import compiled, starting, types
from hetjax.checkpoints import checkpoint
from hetjax.config import experiment as config_lib
from hetjax.data import sources, stream
from hetjax.processes import beacons as beacons_lib
from hetjax.processes import board as board_lib
from hetjax.processes import join, solutions, waits, watch
from hetjax.rounds import (
    arguments,
    gathering,
    inputs,
    local,
    planning,
    programs,
    reporting,
    resume,
    run_records,
    setup,
    warm_up,
)
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import rules as rules_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_records import Executed, Lineage, Plan, RunState


class Run:
    """Rounds of training on workers that are not equal, one at a time.

    Args:
        loss_fn, params, source, workers, per_example_rng: as for `fit`.
        optimizer: as for `fit`; None: rounds without an update, whose mean contribution is in
            the report.
        rule: what a worker does with its microbatches; by default it adds up gradients.
        rules: of further kinds of rounds, by name, without update; the policy learns each apart.
        config: a checked configuration; or give `fields`.
        solved: numbers that the run solved before it was interrupted, by problem (`restore`).
        begins: told what goes on before the first round.
        beside: another run, whose rounds take turns with this one's on the same workers.
        **fields: fields of the configuration, groups as dicts; parts as objects, names or dicts.

    Raises:
        ValueError: what was given cannot be run; said before anything is computed.

    Example:
        >>> import numpy as np, optax
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}
        >>> def loss_fn(params, batch, rng):
        ...     return (batch["x"] @ params - batch["y"]) ** 2
        >>> with Run(loss_fn, np.zeros(3, np.float32), optax.sgd(0.2), data, workers=1,
        ...          epochs=40, microbatch_size=4, budget=4) as run:
        ...     state = run.init()
        ...     while not run.done(state):
        ...         state, report = run.round(state)
        ...     params, _ = run.params(state)
        >>> np.round(params, 2).tolist(), report.examples_processed
        ([1.0, -2.0, 3.0], 2560)
    """

    def __init__(
        self,
        loss_fn: losses_lib.LossFn,
        params: types.PyTree,
        optimizer: optax.GradientTransformation | None,
        source: Any,
        *,
        workers: int | None = None,
        per_example_rng: bool = False,
        rule: rules_lib.LocalRule | None = None,
        rules: Mapping[str, rules_lib.LocalRule] | None = None,
        config: config_lib.ExperimentConfig | None = None,
        solved: Callable[[], dict[str, solutions.Numbers]] = dict,
        begins: starting.Starting | None = None,
        beside: "Run | None" = None,
        **fields: Any,
    ) -> None:
        join.check_joined()
        self._begins = begins or starting.Starting()
        inputs.check(loss_fn, params, optimizer)
        given = arguments.configuration(config, fields, workers=workers, rule=rule, more=rules)
        self.config, self.recorded = given.config, given.recorded
        compiled.keep(self.config.compilation_cache)
        source = sources.as_source(source)
        self._is_guest = beside is not None
        self.beacons: beacons_lib.Beacons = beside.beacons if beside else beacons_lib.start()
        if beside is None:
            watch.follow(self.beacons)
        self.beacons.at("starting")
        several = jax.process_count() > 1 and self.config.local != "virtual"
        if several:
            gathering.check_same_run(self.recorded, num_examples=len(source))
        self.parts: setup.RunParts = setup.build(
            loss_fn,
            params,
            optimizer,
            source,
            config=self.config,
            chosen=given.parts,
            per_example_rng=per_example_rng,
            rule=given.rule,
            more_rules=rules or {},
            beacons=self.beacons,
            solved=solutions.Solutions(
                leads=jax.process_index() == 0,
                board=board_lib.Board("solutions") if several else None,
                kept=solved,
            ),
            begins=self._begins,
            meeting=None if beside is None else beside.parts.meeting,
        )
        parts = self.parts
        if several:
            gathering.check_same_parts(
                parts.state.params,
                shards=(parts.stream.shards, parts.stream.shares),
                mixing=parts.reducer.mixing,
                trace=parts.trace,
            )
        self.num_workers = len(parts.devices)
        self.is_closed = False
        self._warm: dict[str, run_records.Shapes] = {}  # what each kind of round is given
        self._pass_keys = local.PassKeys(parts.rng, parts.devices, parts.workers)
        self._last: reporting.Report | None = None  # whose round may not be over yet
        self._last_made: types.PyTree = None  # by the last round
        self._gathered = 0.0  # perf_counter, after the gathering of the last round
        self._tail_secs = 0.0  # of the last round, after its gathering

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            watch.left(error)
        self.close()

    def close(self) -> None:
        """Frees threads; no round can be run any more."""
        self.is_closed = True
        self.parts.close()
        if not self._is_guest:
            self.beacons.close()

    def init(self, given: types.PyTree = (), *, train: types.TrainState | None = None) -> RunState:
        """The state before the first round; the first call compiles and warms up.

        Args:
            given: of the shapes that `round` will be given, where the rule asks for values.
            train: another run's parameters, optimiser's state and progress, to begin with.
        """
        parts = self.parts
        begun = parts.state if train is None else resume.from_train(train, parts)
        state = RunState(
            train=begun,
            carried=parts.main.begin(begun, given),
            signed=parts.observer is not None,
            policies=planning.begun_policies(parts),
            stream=parts.stream.init(),
            passes=np.zeros(self.num_workers, int),
            full_quotas=np.zeros(self.num_workers, int),
            rounds_done=0,
            lineage=Lineage(self),
            generation=0,
        )
        if programs.MAIN in self._warm:
            return state
        with self._begins.stage("compiling"):
            return self._warm_up(state, programs.MAIN, given)

    def restore(self, directory: str | pathlib.Path, given: types.PyTree = ()) -> RunState:
        """The state of the newest checkpoint in a directory, or a workdir; `given` as for `init`.

        Raises:
            ValueError: there is none, or it is of a run with other parts or another rule.
        """
        return self.go_on(resume.newest(directory, self.parts, self.recorded), given)[0]

    def go_on(self, saved: checkpoint.Saved, given: types.PyTree = ()) -> tuple[RunState, Any]:
        """The state of a checkpoint, and the best parameters in it, if there are any."""
        state, best_params = resume.from_arrays(saved, self.init(given), self.parts)
        return state._replace(carried=self.parts.main.begin(state.train, given)), best_params

    def done(self, state: RunState) -> bool:
        """Whether all epochs or rounds are, or the trace that is replayed has no more rounds."""
        return self.is_complete(state) or self.is_end_of_trace(state)

    def is_complete(self, state: RunState) -> bool:
        """Whether as many examples are processed as the epochs have, or `max_rounds` are done."""
        of_epochs = self.config.epochs * self.parts.stream.num_examples
        is_over = state.stream.examples_processed >= of_epochs
        return is_over or 0 < self.config.max_rounds <= state.rounds_done

    def is_end_of_trace(self, state: RunState) -> bool:
        """Whether the trace that is replayed has no more rounds."""
        return self.parts.trace is not None and state.rounds_done >= len(self.parts.trace)

    def params(self, state: RunState) -> tuple[types.PyTree, dict[str, float] | None]:
        """The parameters on this process's first device, and how far the replicas are from them.

        All processes call it. Where a reducer gossips, the parameters are the mean of the
        replicas; else the distance is None.
        """
        if self.parts.reducer.keeps_replicas_equal:
            return state_lib.own_row(state.train.params), None
        return state_lib.consensus(state.train, self.parts.own_device)

    def round(
        self,
        state: RunState,
        *,
        kind: str = programs.MAIN,
        given: types.PyTree = (),
        again: stream.Assignment | None = None,
        request: gathering.Request = gathering.Request.NOTHING,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[RunState, reporting.Report]:
        """One round: plan, execute, commit.

        Args:
            state: from `init`, `restore` or the round before; it is spent.
            kind: of round: a name in `rules`; by default the run's own rule, with its update.
            given: values of the round, the same for all workers: `shared.given` of the rule.
            again: `report.done` of a past round: its microbatches are done once more, cut by new
                quotas. No gate closes it; orders and ledger stay as they are.
            request: what this process asks of all of them.
            meanwhile: called while the workers compute.

        Returns:
            the next state, and the report, whose numbers may still be on the devices.

        Raises:
            ValueError: the state is spent, or another run's; nothing was computed.
            NonFiniteError: a microbatch of the round before was not finite.
        """
        run_records.check_state(state, self)
        self.parts.check_kind(kind)
        self.parts.feed.compare(self.parts.stream.epoch(state.stream))
        if kind not in self._warm:
            state = self._warm_up(state, kind, given)
        began, last = time.perf_counter(), self._last
        index = state.rounds_done
        self.beacons.at("computing" if self.config.local == "fused" else "waiting", index)
        plan = self.plan(state, kind=kind, given=given, again=again)
        if last is not None:
            last.end(began)

        def host_work() -> None:
            meanwhile()
            if last is not None:
                last.check()

        with jax.profiler.StepTraceAnnotation("round", step_num=index):
            executed = self.execute(plan, request=request, meanwhile=host_work, began=began)
            new = self.commit(state, plan, executed)
        processed = new.stream.examples_processed
        before = state.stream.examples_processed
        report = reporting.Report(
            self.parts,
            plan,
            executed,
            settle=self.settle,
            examples=stream.examples_in(again.example_ids) if again else processed - before,
            examples_processed=processed,
            began=began,
        )
        if last is None:
            report.check_reducer()
        self._last, self._last_made = report, executed.sums.made
        self._tail_secs = time.perf_counter() - self._gathered
        return new, report

    def settle(self) -> None:
        """Waits for the last update, which belongs to its round, and ends that round.

        Call it before a pause: the run's clock stands still from there to the next round.
        """
        if self._last is None:
            return
        began = time.perf_counter()
        with waits.Wait("synchronise", is_vain=False):  # they may have come to their exit by then
            jax.block_until_ready(self._last_made)
        now = time.perf_counter()
        self._tail_secs += now - began
        self._last.end(now)

    # --- The steps of a round ---

    def plan(
        self, state: RunState, *, kind: str = programs.MAIN, given: Any = (), again: Any = None
    ) -> Plan:
        """What the next round is to do; has no effect, but that the feed hears what comes.

        Raises:
            ValueError: the state is spent, or another run's; `given` or the trace does not fit.
        """
        run_records.check_state(state, self)
        self.parts.check_kind(kind)
        run_records.check_given(given, self._warm.get(kind))
        plan = planning.plan(self.parts, state, kind=kind, given=given, again=again)
        if self.parts.feed.reads_ahead and again is None:
            upcoming = self.parts.stream.upcoming(state.stream, plan.quotas, self.parts.workers)
            self.parts.feed.read_ahead(upcoming)
        return plan

    @watch.taking_part
    def execute(
        self,
        plan: Plan,
        *,
        request: gathering.Request = gathering.Request.NOTHING,
        meanwhile: Callable[[], None] = lambda: None,
        began: float | None = None,
    ) -> Executed:
        """Does a round, and spends the plan's state: local phase, gathering, sync phase.

        Args:
            plan: from `plan`.
            request: what this process asks of all of them.
            meanwhile: called while the workers compute.
            began: `perf_counter` when the host began with this round; now, if not given.
        """
        began = time.perf_counter() if began is None else began
        parts, state, is_main = self.parts, plan.state, plan.kind == programs.MAIN
        own_kind = parts.programs_of(plan)
        run_records.check_state(state, self)
        state.lineage.newest = state.generation + 1
        train, carried = parts.begun(plan)
        kept, train = train.worker, train if is_main else train._replace(worker=())
        if jax.tree.leaves(plan.given) or not is_main:  # else the round before has begun this one
            carried = own_kind.begin(train, plan.given)
        own = own_kind.local.run(
            plan.round_index,
            train,
            carried,
            plan.assigned,
            rngs=self._pass_keys(plan.assigned.passes),
            limits=plan.limits,
            given=plan.given,
            may_close=plan.may_close,
            meanwhile=meanwhile,
        )
        own_kind.sums.post(own.contributed)
        host_secs = 0.0
        if parts.host_is_own(plan.kind):
            host_secs = self._tail_secs + time.perf_counter() - began - own.compute_secs.max()
        self._begins.detail("the synchronisation")
        told = parts.gather(own, plan.digests, request, host_secs)
        self._gathered = time.perf_counter()
        contributed = own_kind.sums.total(own.contributed, told.clocks.host_secs)  # all have posted
        with waits.Wait("synchronise"):
            sums = own_kind.sync(
                train, contributed, parts.shares, plan.active, told.metrics, plan.given
            )
        clocks = told.clocks
        if plan.closing is not None:
            clocks = clocks._replace(
                compute_secs=plan.closing.compute_secs, local_secs=float(plan.closing.round_secs)
            )
        after = sums.whole_state(train)._replace(**({} if is_main else {"worker": kept}))
        sums = sums._replace(state=after, metrics=told.metrics or sums.metrics)
        return Executed(plan, told.done._replace(flips=sums.flips), clocks, sums, told.asked)

    def commit(self, state: RunState, plan: Plan, executed: Executed) -> RunState:
        """The state after a round, of what `execute(plan)` returned: see `planning.commit`.

        Raises:
            ValueError: the plan is of another state, or is committed already, or `executed` is of
                another plan.
        """
        run_records.check_commit(state, plan, executed, self)
        return planning.commit(self.parts, state, plan, executed)

    def _warm_up(self, state: RunState, kind: str, given: types.PyTree) -> RunState:
        state = warm_up.warm_up(self, state, kind, given)
        self._tail_secs = time.perf_counter() - self._gathered
        self._warm[kind] = run_records.shapes_of(given)
        return state
