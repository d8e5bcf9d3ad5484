"""Both phases of a kind of round are compiled and run before its first round.

Twice: what a round needs of memory lies elsewhere in the next, and is slow when new. Nothing is
changed by it, and nothing of it is timed.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.processes import waits
from hetjax.rounds import planning, programs, run_state, sync

Execute = Callable[[run_state.Plan], run_state.Executed]


def of_run(
    run: Any, execute: Execute, state: run_state.RunState, kind: str, given: types.PyTree
) -> run_state.RunState:
    """Of a kind of a `Run`, whose rounds `execute` does.

    Rounds that find no signs come first, where an order has passes without. In debugging nothing
    is compiled that would have to run before.
    """
    if run.config.debug:
        run.warmed_up(kind, given)
        return state
    signed = run.parts.observer is not None
    if run.parts.unsigned is not None and kind == programs.MAIN:
        state = _of_run(run, execute, state, kind, given, signed=False)
    state = _of_run(run, execute, state, kind, given, signed=signed)
    run.warmed_up(kind, given)
    return state


def _of_run(
    run: Any,
    execute: Execute,
    state: run_state.RunState,
    kind: str,
    given: types.PyTree,
    *,
    signed: bool,
) -> run_state.RunState:
    parts = run.parts
    for is_second in (False, True):
        if is_second:
            _touch_memory(parts)
        plan = planning.warm_up_plan(parts, state.rounds, kind=kind, signed=signed, given=given)
        own, train = plan.programs, state.train
        if own.updates and signed != state.signed:
            carried = own.begin(train.params, train.kept, given)
            state = state._replace(carried=carried, signed=signed)
        if own.updates and not is_second:
            others = parts.shares, plan.active, (), given
            own.compile_sync_ahead(train, train.params, state.carried, *others)
        executed = execute(plan._replace(state=state))
        _wait(executed.sums)
        rounds = state.rounds._replace(generations=run_state.Generations(run), generation=0)
        state = run.next_state(state, executed, rounds)
        if signed and own.updates and parts.new_pass is not None:
            nobody = np.zeros(run.num_workers, bool)
            memory, carried = parts.new_pass(state.train.memory, state.carried, nobody)
            state = state._replace(train=state.train._replace(memory=memory), carried=carried)
    params, _ = run.params(state)
    jax.block_until_ready(params)
    return state


def of_sums(
    engine: Any,
    rounds: run_state.RoundsState,
    point: types.PyTree,
    kind: str,
    given: types.PyTree,
) -> None:
    """Of a kind of an `Engine`, at a point with leaves `[W, ...]`."""
    parts = engine.parts
    if engine.config.debug:
        engine.warmed_up(kind, given)
        return
    for is_second in (False, True):
        if is_second:
            _touch_memory(parts)
        fresh = rounds._replace(generations=run_state.Generations(engine), generation=0)
        plan = planning.warm_up_plan(parts, fresh, kind=kind, signed=False, given=given)
        own = plan.programs
        if not is_second:
            carried = own.begin(point, types.Kept(), given)
            others = parts.shares, plan.active, (), given
            own.compile_sync_ahead(types.Kept(), point, carried, *others)
        _wait(engine.add_up(plan, point, types.Kept()).sums)
    engine.warmed_up(kind, given)


def _touch_memory(parts: Any) -> None:
    if parts.meeting.keeps_memory and parts.own_device.platform == "cpu":
        copy = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.state.params))
        mesh_lib.touch_memory(copy // len(parts.devices) * len(parts.workers))


def _wait(sums: sync.Synchronised) -> None:
    jax.device_get(sums.metrics)
    with waits.Wait("synchronise"):
        jax.block_until_ready((sums.state, sums.mean, sums.own))
