"""A run that steps: one round goes in as a state and comes out as the next one.

`plan` says what a round is to do, `execute` does it, `commit` makes the next state of what was
done; `round` is the three of them. `plan` and `commit` have no effects. Everything that the rounds
to come depend on is in the state; `Run` holds what never changes.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from hetjax import messages, stateful, types
from hetjax.checkpoints import checkpoint
from hetjax.data import sources, stream
from hetjax.rounds import (
    embeddings,
    engine,
    fingerprint,
    gathering,
    inputs,
    planning,
    programs,
    resume,
    round_report,
    run_state,
    setup,
    warm_up,
)
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_state import Executed, Plan, RoundsState, RunState


class Run(engine.Engine):
    """Rounds of training on workers that are not equal, one at a time.

    Args:
        loss_fn, params, source: as for `fit`.
        optimizer: as for `fit`; None: rounds without an update, whose mean contribution is in
            the report.
        model_state, state_reduce: as for `fit`.
        **options: of `Engine`: `workers`, `per_example_rng`; `rule`, and `rules` of further kinds
            of rounds, without update; `config`, a checked configuration, or its fields, groups as
            dicts, parts as objects, names or dicts; `solved` (`restore`), `begins`, `beside`.

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
        model_state: types.PyTree | None = None,
        state_reduce: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        loss_fn = stateful.of(loss_fn, model_state, state_reduce)
        inputs.check(loss_fn, params)
        ema = options.get("ema") or getattr(options.get("config"), "ema", 0)
        if optimizer is not None:
            optimizer = inputs.check_optimizer(optimizer, params)
        elif ema:
            raise ValueError(
                f"Run: ema={ema!r} with optimizer=None: rounds without an update change "
                "no parameters, so there is nothing to average. Give an optimizer, or leave ema out"
            )
        source = sources.as_source(source)
        self._given = loss_fn, params, optimizer, source
        build = functools.partial(setup.build, optimizer=optimizer)
        super().__init__(loss_fn, params, source, build=build, **options)

    def init(self, given: types.PyTree = (), *, train: types.TrainState | None = None) -> RunState:
        """The state before the first round; the first call compiles and warms up.

        Args:
            given: of the shapes that `round` will be given, where the rule asks for values.
            train: another run's parameters, optimiser's state and progress, to begin with.

        Returns:
            The state, on the devices.

        Raises:
            ValueError: `train` is none, or of another model or optimiser.
        """
        parts = self.parts
        begun = parts.state if train is None else resume.from_train(train, parts)
        state = RunState(
            begun, self._carried(begun, given), parts.observer is not None, self.begin()
        )
        if self.is_warm(programs.MAIN):
            return state
        with self.begins.stage("compiling"):
            return warm_up.of_run(self, state, programs.MAIN, given)

    def _carried(self, train: types.TrainState, given: types.PyTree) -> Any:
        """Into the next round that updates; () where none does."""
        main = self.parts.main
        return main.begin(train.params, train.kept, given) if main.updates else ()

    def fingerprint(self, train: types.TrainState | None = None) -> dict[str, Any]:
        """Digests of what the run depends on beside its configuration; `train` as for `init`."""
        return fingerprint.make(*self._given, train, parts=self.parts)

    def restore(
        self, directory: str | pathlib.Path, given: types.PyTree = (), *, force: bool = False
    ) -> RunState:
        """The state of the newest checkpoint in a directory, or a workdir.

        Args:
            directory: of a run that began with this loss, optimiser, rule, initial parameters and
                data.
            given: as for `init`.
            force: go on with another loss, optimiser, or other values of parameters and data, too.

        Raises:
            ValueError: there is none, or it is of a run with other parts, or of another run.
        """
        saved = resume.newest(directory, self.parts, self.recorded)
        there = saved.about.get("fingerprint")
        found = fingerprint.differences(there, self.fingerprint()) if there else {}
        if "optimizer" in found:
            found["optimizer"] += resume.given_anew(saved.arrays, self.parts)
        held = f"restore: the run in {str(directory)!r}"
        way = "Take init(), or the directory of another run"
        told = fingerprint.check(found, held, way=way, force="force=True", is_forced=force)
        if told and self.parts.leads:
            messages.say(told)
        return self.go_on(saved, given)[0]

    def go_on(self, saved: checkpoint.Saved, given: types.PyTree = ()) -> tuple[RunState, Any]:
        """The state of a checkpoint, and the best parameters in it, if there are any.

        Args:
            saved: what a checkpoint holds.
            given: as for `init`.

        Returns:
            The state, and a pytree of the best parameters or None.
        """
        state, best_params = resume.from_arrays(saved, self.init(given), self.parts)
        self.parts.feed.go_on(state.stream, saved.about.get("source"))
        return state._replace(carried=self._carried(state.train, given)), best_params

    def done(self, state: RunState) -> bool:
        """Whether all epochs or rounds are, or the trace or the iterable has no more of them."""
        if self.is_complete(state) or self.is_end_of_trace(state):
            return True
        return bool(self.end_of_source(state))

    def params(self, state: RunState) -> tuple[types.PyTree, dict[str, float] | None]:
        """The parameters on this process's first device, and how far the replicas are from them.

        All processes call it. Where a reducer gossips, the parameters are the mean of the
        replicas; else the distance is None. Of `optax.LookaheadParams` they are the slow ones, in
        both places.

        Returns:
            A pytree without worker axis, and `{name: distance}` of the replicas or None.
        """
        if self.parts.reducer.keeps_replicas_equal:
            return state_lib.judged(state_lib.own_row(state.train.params)), None
        mean, distance = state_lib.consensus(state.train, self.parts.own_device)
        return state_lib.judged(mean), distance

    def model_state(self, state: RunState) -> types.PyTree:
        """The model's state on this process's first device, as `params` gives the parameters.

        Of a model without it is ().

        Returns:
            A pytree without worker axis.
        """
        rows = state.train.model_state
        if self.parts.reducer.keeps_replicas_equal or not jax.tree.leaves(rows):
            return state_lib.own_row(rows)
        return state_lib.mean_on(rows, self.parts.own_device)

    def average(self, state: RunState) -> types.Model:
        """The averages of parameters and model's state by `ema`, in the types of these.

        On this process's first device; with a reducer that gossips the mean of the replicas'. All
        processes call it.

        Raises:
            ValueError: the run keeps none.
        """
        train = state.train
        if not self.config.ema:
            raise ValueError(f"Run.average: {round_report.NO_AVERAGE}")
        if self.parts.reducer.keeps_replicas_equal:
            found = state_lib.own_row(train.average)
        else:
            found = state_lib.mean_on(train.average, self.parts.own_device)
        found = state_lib.narrowed(found, types.Model(train.params, train.model_state))
        return found._replace(params=state_lib.judged(found.params))

    def model(self, state: RunState) -> tuple[types.PyTree, dict[str, float] | None]:
        """As `params`; with the model's state, as a `Model`, where it keeps one.

        Returns:
            The parameters or a `Model`, and the distance as of `params`.
        """
        params, distance = self.params(state)
        if not self.parts.is_stateful:
            return params, distance
        return types.Model(params, self.model_state(state)), distance

    def round(
        self,
        state: RunState,
        *,
        kind: str = programs.MAIN,
        given: types.PyTree = (),
        again: stream.Assignment | None = None,
        request: gathering.Request = gathering.Request.NOTHING,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[RunState, round_report.Report]:
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
        if not self.is_warm(kind):
            run_state.check_state(state, self)
            state = warm_up.of_run(self, state, kind, given)
        plan = self.opened(state, kind=kind, given=given, again=again)
        with jax.profiler.StepTraceAnnotation("round", step_num=plan.round_index):
            host_work = functools.partial(self.check_last, meanwhile)
            executed = self.execute(plan, request=request, meanwhile=host_work)
            rounds, report = self.closed(plan, executed)
        report.mean, report.own = executed.sums.mean, executed.sums.own
        return self.next_state(state, executed, rounds), report

    # --- The steps of a round ---

    def execute(self, plan: Plan, **options: Any) -> Executed:
        """Does a round, and spends the plan's state: local phase, gathering, sync phase.

        Args:
            plan: from `plan`.
            **options: `request` and `meanwhile` of `work`.

        Raises:
            ValueError: the state of the plan is spent, or of another run.
        """
        run_state.check_state(plan.state, self)
        assert isinstance(plan.state, RunState)
        if self.parts.embedding is not None and plan.kind == programs.MAIN:
            return embeddings.execute(self, plan, **options)
        return self.execute_pass(plan, **options)

    def execute_pass(self, plan: Plan, handed: types.PyTree = (), **options: Any) -> Executed:
        """As `execute`; the last pass of a round, handed what the ones before it found.

        Args:
            plan: from `plan`.
            handed: values for the rule, in place of those of the plan.
            **options: as for `execute`.
        """
        assert isinstance(plan.state, RunState)
        train, own = plan.state.train, plan.programs
        if not own.updates:
            is_main = plan.kind == programs.MAIN
            kept = train.kept if is_main else types.Kept(model_state=train.model_state)
            given = plan._replace(given=handed or plan.given)
            executed = self.add_up(given, train.params, kept, **options)
            if is_main:
                train = train._replace(**executed.sums.state._asdict())
            return executed._replace(plan=plan, sums=executed.sums._replace(state=train))
        carried = plan.state.carried
        if jax.tree.leaves(plan.given) or plan.signed != plan.state.signed:
            carried = own.begin(train.params, train.kept, plan.given)
        train, carried = self.renewed(plan, train, carried)
        given = handed or plan.given
        shared = types.Shared(train.params, given, model_state=train.model_state)
        if own.steps.moments is not None:
            shared = shared._replace(moments=own.steps.moments(train.opt_state))
        return self.work(plan, train, shared, carried, **options)

    def commit(self, state: RunState, plan: Plan, executed: Executed) -> RunState:
        """The state after a round, of what `execute(plan)` returned: see `planning.commit`.

        Raises:
            ValueError: the plan is of another state, or is committed already, or `executed` is of
                another plan.
        """
        rounds = run_state.check_commit(state, plan, executed, self)
        rounds = planning.commit(self.parts, rounds, plan, executed)
        return self.next_state(state, executed, rounds)

    def next_state(self, state: RunState, executed: Executed, rounds: RoundsState) -> RunState:
        """The state after a round, of what was made on the devices and of what is on the host."""
        sums: Any = executed.sums
        if not executed.plan.programs.updates:
            return state._replace(train=sums.state, rounds=rounds)
        return RunState(sums.state, sums.carried, executed.plan.signed, rounds)
