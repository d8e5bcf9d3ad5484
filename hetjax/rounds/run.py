"""A run that steps: one round goes in as a state and comes out as the next one.

A round is planned, executed and committed; planning and committing (`planning`) have no effects.
Everything that the rounds to come depend on is in the state; `Run` holds what never changes.
"""

import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hetjax import digests, executor, slices, types
from hetjax import mesh as mesh_lib
from hetjax.checkpoints import checkpoint
from hetjax.comm import allgather_work
from hetjax.data import stream
from hetjax.inputs import refusals as inputs
from hetjax.local import packing
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib
from hetjax.losses import stateful
from hetjax.rounds import engine, judged, resume, round_report, run_state, warm_up
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import state as state_lib
from hetjax.rounds.run_state import Executed, Plan, RoundsState, RunState

logger = logging.getLogger(__name__)


class Run(engine.Engine):
    """Rounds of training on workers that are not equal, one at a time.

    Args:
        loss_fn, params, source: as for `fit`.
        optimizer: as for `fit`; None: rounds without an update, whose mean contribution is in
            the report.
        model_state, state_reduce, frozen, values: as for `fit`.
        asking: further functions that may ask for the last two, such as metrics.
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
        >>> np.round(params, 2).tolist(), report.read().counts.examples_processed
        ([1.0, -2.0, 3.0], 2560)
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        loss_fn: losses_lib.LossFn,
        params: types.PyTree,
        optimizer: optax.GradientTransformation | None,
        source: Any,
        *,
        model_state: types.PyTree | None = None,
        state_reduce: Mapping[str, str] | None = None,
        frozen: types.PyTree | None = None,
        values: Any = None,
        asking: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        loss_fn = named_lib.giving(stateful.of(loss_fn, model_state, state_reduce), 3)
        inputs.check(loss_fn, params)
        is_own = options.get("rule") is not None
        asking = (source, *asking)
        by_name = named_lib.beside(loss_fn, frozen, values, *asking, caller="Run", is_own=is_own)
        if optimizer is None and values is not None:
            raise ValueError("Run: values= with optimizer=None: no update changes them")
        ema = options.get("ema") or getattr(options.get("config"), "ema", 0)
        if optimizer is not None:
            optimizer = inputs.check_optimizer(optimizer, params)
        elif ema:
            raise ValueError(f"Run: ema={ema!r} with optimizer=None: there is no update to average")
        options |= {"optimizer": optimizer, "by_name": by_name}
        with named_lib.scope(values_at=by_name.values.of_progress):
            super().__init__(loss_fn, params, source, **options)
        begun = self.setup.begun
        if (text := judged.told(begun.params, begun.opt_state)) and self.setup.where.leads:
            logger.info(text)

    @jax.transfer_guard("allow")
    def init(self, given: types.PyTree = (), *, train: Any = None) -> RunState:
        """The state before the first round; the first call compiles and warms up.

        Args:
            given: of the shapes that `round` will be given, where the rule asks for values.
            train: another run's parameters, optimiser's state and progress, to begin with; or its
                result, whose quotas go on, too.

        Returns:
            The state, on the devices.

        Raises:
            ValueError: `train` is none, or of another model or optimiser.
        """
        setup, rounds = self.setup, self.begin()
        if (known := getattr(train, "learned", None)) is not None:
            rounds, train = resume.with_learned(rounds, known, setup), train.state
        begun = setup.begun if train is None else resume.from_train(train, setup)
        state = RunState(begun, (), setup.methods.observer is not None, rounds)
        if setup_lib.MAIN not in self.warm:
            with self.begins.stage("compiling"):
                state = warm_up.of_run(self, state, setup_lib.MAIN, given)
        return state if state.carried else state._replace(carried=self._carried(begun, given))

    def _carried(self, train: types.TrainState, given: types.PyTree) -> Any:
        """Into the next round that updates; () where none does."""
        main = self.setup.programs.main
        return main.begin(train.params, train.kept, given) if main.updates else ()

    def fingerprint(self, train: types.TrainState | None = None) -> dict[str, Any]:
        """What the run depends on beside its configuration; `train` as for `init`.

        Returns:
            Digests of loss, optimiser, rule, parameters and data, by name: texts and numbers.
        """
        if train is None:
            return self.digests
        began = mesh_lib.own_row(types.Model(train.params, train.model_state))
        return self.digests | {"params": digests.of_arrays(began)}

    @jax.transfer_guard("allow")
    def restore(
        self, directory: str | pathlib.Path, given: types.PyTree = (), *, force: bool = False
    ) -> RunState:
        """The state of the newest checkpoint in a directory, or a workdir.

        Args:
            directory: of a run that began with this loss, optimiser, rule, initial parameters and
                data, in this configuration. What `fit` may resume with may be otherwise here, too:
                more epochs, other workers, another policy.
            given: as for `init`.
            force: go on with another loss, optimiser, or other values of parameters and data, too.

        Raises:
            ValueError: there is none, or it is of another configuration, or of another run.
        """
        saved, grown = resume.newest(directory, self.setup, self.recorded)
        resume.check_given(
            saved.about.get("fingerprint", {}),
            self.digests,
            saved,
            self.setup,
            is_grown=bool(grown),
            held=f"restore: the run in {str(directory)!r}",
            way="Take init(), or the directory of another run",
            force="force=True",
            is_forced=force,
        )
        return self.go_on(saved, given)[0]

    def go_on(self, saved: checkpoint.Saved, given: types.PyTree = ()) -> tuple[RunState, Any]:
        """The state of a checkpoint, and the best parameters in it, if there are any.

        Args:
            saved: what a checkpoint holds.
            given: as for `init`.

        Returns:
            The state, and a pytree of the best parameters or None.
        """
        state, best_params = resume.from_arrays(saved, self.init(given), self.setup)
        self.setup.feed.go_on(state.stream, saved.about.get("source"))
        return state._replace(carried=self._carried(state.train, given)), best_params

    def done(self, state: RunState) -> bool:
        """Whether all epochs or rounds are, or the trace or the iterable has no more of them."""
        is_over = self.is_complete(state) or self.is_end_of_trace(state)
        return is_over or bool(self.end_of_source(state))

    @jax.transfer_guard("allow")
    def params(self, state: RunState) -> tuple[types.PyTree, dict[str, float] | None]:
        """The parameters on this process's first device, and how far the replicas are from them.

        All processes call it. Where a reducer gossips, the parameters are the mean of the
        replicas; else the distance is None. They are those to evaluate: of `optax.LookaheadParams`
        the slow ones, in both places; of schedule-free training the average.

        Returns:
            A pytree without worker axis, and `{name: distance}` of the replicas or None.
        """
        rows = judged.of(state.train.params, state.train.opt_state)
        if self.setup.methods.reducer.keeps_replicas_equal:
            return mesh_lib.own_row(rows), None
        return state_lib.consensus(rows, self.setup.where.own_device)

    def model_state(self, state: RunState) -> types.PyTree:
        """The model's state on this process's first device, as `params` gives the parameters.

        Of a model without it is ().

        Returns:
            A pytree without worker axis.
        """
        return self._one(state.train.model_state)

    def named(self, train: types.TrainState) -> types.Named:
        """What losses and metrics may ask for by name, on this process's first device.

        With a reducer that gossips `values` are the mean of the replicas'. All processes call it.
        """
        values = self._one(train.values) if jax.tree.leaves(train.values) else ()
        return self.setup.own_named._replace(values=values)

    def _one(self, rows: types.PyTree) -> types.PyTree:
        """One copy on this process's first device of rows, or their mean where they differ."""
        if self.setup.methods.reducer.keeps_replicas_equal or not jax.tree.leaves(rows):
            return mesh_lib.own_row(rows)
        return state_lib.mean_on(rows, self.setup.where.own_device)

    def average(self, state: RunState) -> types.Model:
        """The averages of parameters and model's state by `ema`, in the types of these.

        On this process's first device; with a reducer that gossips the mean of the replicas'. All
        processes call it.

        Raises:
            ValueError: the run keeps none.
        """
        train = state.train
        if not self.config.ema:
            raise ValueError(f"Run.average: {types.NO_AVERAGE}")
        like = types.Model(train.params, train.model_state)
        return state_lib.narrowed(self._one(train.average), like)

    def model(self, state: RunState) -> tuple[types.PyTree, dict[str, float] | None]:
        """As `params`; with the model's state, as a `Model`, where it keeps one.

        Returns:
            The parameters or a `Model`, and the distance as of `params`.
        """
        params, distance = self.params(state)
        if not self.setup.is_stateful:
            return params, distance
        return types.Model(params, self.model_state(state)), distance

    def round(
        self,
        state: RunState,
        *,
        kind: str = setup_lib.MAIN,
        given: types.PyTree = (),
        again: stream.Assignment | None = None,
        request: allgather_work.Request = allgather_work.Request.NOTHING,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[RunState, round_report.Report]:
        """One round: planned, executed, committed.

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
        if kind not in self.warm:
            run_state.check_state(state, self)
            state = executor.moving(warm_up.of_run)(self, state, kind, given)
        plan = self.open(state, kind=kind, given=given, again=again)
        with jax.profiler.StepTraceAnnotation("round", step_num=plan.local.round_index):
            execute = executor.moving(self.execute)
            executed = execute(state, plan, request=request, meanwhile=meanwhile)
            rounds, report = executor.moving(self.close_round)(executed)
        report.mean, report.own = executed.sums.mean, executed.sums.own
        return self.next_state(state, executed, rounds), report

    # --- What a round is made of ---

    def execute(self, state: RunState, plan: Plan, **options: Any) -> Executed:
        """Does a round, and spends the state: local phase, gathering, sync phase.

        Args:
            state: of which the plan is.
            plan: from `open`, or of a warm-up.
            **options: of `compute`.
        """
        train, own = state.train, plan.programs
        with self.together():
            now, first = plan, None  # what the last pass is to do; what another did before it
            if self.setup.programs.embedding is not None and own.kind == setup_lib.MAIN:
                now, first = self._first_pass(train, plan, **options)
                options = {**options, "meanwhile": None}
            if not own.updates:
                executed = self._added_up(train, now, **options)
            else:
                carried: Any = state.carried
                if jax.tree.leaves(plan.given) or plan.signed != state.signed:
                    carried = own.begin(train.params, train.kept, plan.given)
                begun = train, train.params, carried  # the next round is given what this one was
                executed = self.phases(now, begun, plan.given, **options)
            if first is not None:
                plan = plan._replace(given=now.given)
                executed = executed._replace(plan=plan, work=_both(first, executed.work))
            return executed

    def _added_up(self, train: types.TrainState, plan: Plan, **options: Any) -> Executed:
        """A round without update; what the main kind keeps goes into the state."""
        is_main = plan.programs.kind == setup_lib.MAIN
        kept = train.kept if is_main else train.kept._replace(memory=(), worker=())
        executed = self.add_up(plan, train.params, kept, **options)
        if is_main:
            train = train._replace(**executed.sums.state._asdict())
        return executed._replace(sums=executed.sums._replace(state=train))

    def next_state(self, state: RunState, executed: Executed, rounds: RoundsState) -> RunState:
        """The state after a round, of what was made on the devices and of what is on the host."""
        sums: Any = executed.sums
        if not executed.plan.programs.updates:
            return state._replace(train=sums.state, rounds=rounds)
        return RunState(sums.state, sums.carried, executed.plan.signed, rounds)

    def _first_pass(
        self, train: types.TrainState, plan: Plan, **options: Any
    ) -> tuple[Plan, types.Work]:
        """The first pass of a round of a loss over all of its examples. A gate may close it.

        Returns:
            what the second pass is to do: what the first has done, given the gradient of the loss
            in the embeddings; and the work of the first.

        Raises:
            ValueError: the round is given values, which no pass asks for.
        """
        if jax.tree.leaves(plan.given):
            raise ValueError("given: a batch_loss takes no values; put them into the examples")
        assert self.setup.programs.embedding is not None
        (passes, own), assigned = self.setup.programs.embedding, plan.local.assigned
        ids = assigned.example_ids
        of_first = plan._replace(programs=own, given=passes.first_ids(ids))
        found = self.add_up(of_first, train.params, types.Kept(values=train.values), **options)
        limits = found.work.microbatches_done
        done = np.full_like(ids, -1)
        for start, count in zip(assigned.starts, limits, strict=False):
            done[start : start + count] = ids[start : start + count]
        counted = packing.unpack(jax.device_get(found.sums.metrics))
        is_finite = bool(np.all(counted.nonfinite_microbatch < 0))
        with executor.of(self.config.form), slices.seen(self.setup.where.layout):
            found_in = train.params, found.sums.mean, done, self.named(train)
            handed = passes.handed(*found_in, is_finite=is_finite)
        self.clock.closes()
        local = plan.local._replace(limits=limits, may_close=False)
        return plan._replace(given=handed, local=local, closing=None), found.work


def _both(first: types.Work, second: types.Work) -> types.Work:
    """The work of a round of two passes: their times add up."""
    names = "first_secs", "compute_secs", "overruns", "host_secs", "local_secs"
    return second._replace(**{each: getattr(first, each) + getattr(second, each) for each in names})
