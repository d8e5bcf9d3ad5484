"""Both phases of a kind of round are compiled and run before its first round.

Twice: what a round needs of memory lies elsewhere in the next, and is slow when new. Nothing is
changed by it, and nothing of it is timed.
"""

import functools
from typing import Any

import jax
import numpy as np

from hetjax import cpu_workers, executor, types
from hetjax.liveness import blocking_waits
from hetjax.local import calls
from hetjax.rounds import independence, planning, run_state, sync
from hetjax.rounds import setup as setup_lib


def of_run(
    run: Any, state: run_state.RunState, kind: str, given: types.PyTree
) -> run_state.RunState:
    """Of a kind of a `Run`.

    Rounds that find no signs come first, where an order has passes without. An eager executor
    compiles nothing that would have to run before.
    """
    if run.config.form != executor.EAGER:
        if run.setup.programs.unsigned is not None and kind == setup_lib.MAIN:
            state = _of_run(run, state, kind, given, signed=False)
        signed = run.setup.methods.observer is not None
        state = _of_run(run, state, kind, given, signed=signed)
        if kind == setup_lib.MAIN:
            kept, own = state.train.kept, run.setup.programs.of(kind, signed=signed)
            shared = types.shared(state.train.params, given, kept, run.setup.frozen)
            independence.check(run.setup, own, shared, kept)
    run.warmed_up(kind, given)
    return state


def _of_run(
    run: Any, state: run_state.RunState, kind: str, given: types.PyTree, *, signed: bool
) -> run_state.RunState:
    setup = run.setup
    for is_second in (False, True):
        if is_second:
            _touch_memory(setup)
        plan = planning.warm_up_plan(setup, state.rounds, kind=kind, signed=signed, given=given)
        own, train = plan.programs, state.train
        if own.updates and not is_second:
            begun = train.params, train.kept, given
            _compile_sync_ahead(own, train, begun, setup.shares, plan.active, (), given)
            state = state._replace(carried=own.begin(*begun), signed=signed)
        executed = run.execute(state, plan)
        _wait(executed.sums)
        rounds = state.rounds._replace(generations=run_state.Generations(run), generation=0)
        state = run.next_state(state, executed, rounds)
        if signed and own.updates and setup.new_pass is not None:
            none = np.zeros(run.num_workers, bool)
            memory, carried = setup.new_pass(state.train.memory, state.carried, none)
            state = state._replace(train=state.train._replace(memory=memory), carried=carried)
    jax.block_until_ready(run.params(state)[0])
    return state


def of_sums(
    engine: Any, rounds: run_state.RoundsState, point: types.PyTree, kind: str, given: types.PyTree
) -> None:
    """Of a kind of an `Engine`, at a point with leaves `[W, ...]`."""
    setup = engine.setup
    for is_second in () if engine.config.form == executor.EAGER else (False, True):
        if is_second:
            _touch_memory(setup)
        fresh = rounds._replace(generations=run_state.Generations(engine), generation=0)
        plan = planning.warm_up_plan(setup, fresh, kind=kind, signed=False, given=given)
        own = plan.programs
        if not is_second:
            begun = point, types.Kept(), given
            _compile_sync_ahead(own, types.Kept(), begun, setup.shares, plan.active, (), given)
        _wait(engine.add_up(plan, point, types.Kept()).sums)
        if is_second and kind == setup_lib.MAIN:
            shared = types.shared(point, given, types.Kept(), setup.frozen)
            independence.check(setup, own, shared, types.Kept())
    engine.warmed_up(kind, given)


def _touch_memory(setup: setup_lib.Setup) -> None:
    if setup.company.communicator.keeps_memory and setup.where.own_device.platform == "cpu":
        copy = sum(leaf.nbytes for leaf in jax.tree.leaves(setup.begun.params))
        cpu_workers.touch_memory(copy // len(setup.where.devices) * len(setup.where.own))


def _wait(sums: sync.Synchronised) -> None:
    jax.device_get(sums.metrics)
    with blocking_waits.Wait("synchronise"):
        jax.block_until_ready((sums.state, sums.mean, sums.own))


def _compile_sync_ahead(own: setup_lib.Programs, before: Any, begun: tuple, *others: Any) -> None:
    """Begins to compile the synchronisation, before `begin` and beside `add`.

    Where each worker has a device of this process; in other places it is compiled when called.

    Args:
        own: the programs of the kind.
        before: what the synchronisation takes first.
        begun: what `begin` takes: the parameters before the round, leaves `[W, ...]`.
        *others: what the synchronisation takes after what the workers contribute.
    """
    leaf = jax.tree.leaves(begun)[0]
    is_here = leaf.is_fully_addressable and len(leaf.devices()) == leaf.shape[0]
    if is_here and not own.sums.meet_before:
        own.sync.compile_ahead(before, _contribution_shapes(own, *begun), *others)


def _contribution_shapes(
    own: setup_lib.Programs, params: types.PyTree, kept: types.Kept, given: types.PyTree
) -> types.PyTree:
    """Of what all workers contribute, as the synchronisation takes it; `[W, ...]`."""
    contributed = jax.eval_shape(own.begin, params, kept, given)
    if not own.finishes_late:
        all_shared = types.shared(params, (), kept)
        shared, carried = jax.tree.map(functools.partial(_rows, 1), (all_shared, contributed))
        shared = shared._replace(given=given)
        contributed = jax.eval_shape(functools.partial(calls.finish, own.steps), shared, carried)
    leaf = jax.tree.leaves(params)[0]
    all_rows = functools.partial(_rows, leaf.shape[0], sharding=leaf.sharding)
    return jax.tree.map(all_rows, contributed)


def _rows(num_rows: int, leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    shape = num_rows, *leaf.shape[1:]
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
