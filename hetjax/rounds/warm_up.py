"""Both phases of a kind of round are compiled and run before its first round."""

from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.rounds import planning, programs, run_records


def warm_up(
    run: Any, state: run_records.RunState, kind: str, given: types.PyTree
) -> run_records.RunState:
    """Compiles and runs both phases of a `Run` for every worker, without effect, and untimed.

    Twice: what a round needs of memory lies elsewhere in the next, and is slow when new.
    """
    parts = run.parts
    for is_second in (False, True):
        if is_second and parts.meeting.keeps_memory and parts.own_device.platform == "cpu":
            copy = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.state.params))
            mesh_lib.touch_memory(copy // run.num_workers * len(parts.workers))
        plan = planning.warm_up_plan(parts, state, kind=kind, given=given)
        if not is_second and kind == programs.MAIN:
            others = parts.shares, plan.active, (), given
            parts.main.compile_sync_ahead(state.train, state.carried, *others)
        sums = run.execute(plan).sums
        jax.device_get(sums.metrics)
        train = sums.state
        carried = sums.carried if kind == programs.MAIN else state.carried
        if parts.new_pass is not None:
            train, carried = parts.new_pass(train, carried, np.zeros(run.num_workers, bool))
        lineage = run_records.Lineage(run)
        state = state._replace(train=train, carried=carried, lineage=lineage, generation=0)
        jax.block_until_ready(state.train)
    params, _ = run.params(state)
    jax.block_until_ready(params)
    return state
