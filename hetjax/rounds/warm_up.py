"""Both phases of a kind of round are compiled and run before its first round."""

from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.processes import waits
from hetjax.rounds import planning, programs, run_records


def warm_up(
    run: Any, state: run_records.RunState, kind: str, given: types.PyTree
) -> run_records.RunState:
    """Compiles and runs both phases of a `Run` for every worker, without effect, and untimed.

    Rounds that find no signs come first, where an order has passes without.
    """
    signed = run.parts.observer is not None
    if run.parts.unsigned is not None and kind == programs.MAIN:
        state = _warm_up(run, state, kind, given, signed=False)
    return _warm_up(run, state, kind, given, signed=signed)


def _warm_up(
    run: Any, state: run_records.RunState, kind: str, given: types.PyTree, *, signed: bool
) -> run_records.RunState:
    """Twice: what a round needs of memory lies elsewhere in the next, and is slow when new."""
    parts = run.parts
    for is_second in (False, True):
        if is_second and parts.meeting.keeps_memory and parts.own_device.platform == "cpu":
            copy = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.state.params))
            mesh_lib.touch_memory(copy // run.num_workers * len(parts.workers))
        plan = planning.warm_up_plan(parts, state, kind=kind, signed=signed, given=given)
        if not is_second and kind == programs.MAIN:
            others = parts.shares, plan.active, (), given
            carried = state.carried
            if signed != state.signed:
                carried = parts.programs_of(plan).begin(state.train, given)
                state = state._replace(carried=carried, signed=signed)
            parts.programs_of(plan).compile_sync_ahead(state.train, carried, *others)
        sums = run.execute(plan).sums
        jax.device_get(sums.metrics)
        train = sums.state
        carried = sums.carried if kind == programs.MAIN else state.carried
        if signed and parts.new_pass is not None:
            train, carried = parts.new_pass(train, carried, np.zeros(run.num_workers, bool))
        lineage = run_records.Lineage(run)
        state = state._replace(train=train, carried=carried, lineage=lineage, generation=0)
        with waits.Wait("synchronise"):
            jax.block_until_ready(state.train)
    params, _ = run.params(state)
    jax.block_until_ready(params)
    return state
