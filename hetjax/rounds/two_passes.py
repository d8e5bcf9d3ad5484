"""A round whose loss is over all of its examples does two passes of one plan.

The first gathers embeddings, the second pulls the gradient of the loss in them back through each
microbatch. `embeddings` has the rules of both, and what is between them.
"""

from typing import Any

import jax
import numpy as np

from hetjax import debugging, types
from hetjax.local import packing, stepped
from hetjax.rounds import run_state


def first(run: Any, plan: run_state.Plan, **options: Any) -> tuple[run_state.Plan, stepped.Work]:
    """The first pass of a round of a `Run`; `options` are of `Engine.compute`. A gate may close it.

    Returns:
        what the second pass is to do: what the first has done, given the gradient of the loss in
        the embeddings; and the work of the first.

    Raises:
        ValueError: the round is given values, which no pass asks for.
    """
    if jax.tree.leaves(plan.given):
        raise ValueError(
            "Run.round: given: a round of a batch_loss asks for no values. Close over them, or put "
            "them into the examples"
        )
    assert isinstance(plan.state, run_state.RunState)
    passes, own = run.setup.programs.embedding
    ids, params = plan.assigned.example_ids, plan.state.train.params
    of_first = plan._replace(programs=own, given=passes.first_ids(ids))
    found = run.add_up(of_first, params, types.Kept(), **options)
    limits = found.work.microbatches_done
    done = np.full_like(ids, -1)
    for worker, count in enumerate(limits):
        start = plan.assigned.starts[worker]
        done[start : start + count] = ids[start : start + count]
    counted = packing.unpack(jax.device_get(found.sums.metrics))
    is_finite = bool(np.all(counted.nonfinite_microbatch < 0))
    with debugging.eager(run.config.debug):
        handed = passes.handed(params, found.sums.mean, done, is_finite=is_finite)
    run.clock.closes()
    second = plan._replace(given=handed, limits=limits, may_close=False, closing=None)
    return second, found.work


def both(first: stepped.Work, second: stepped.Work) -> stepped.Work:
    """The work of a round of two passes: their times add up."""
    return second._replace(
        **{
            name: getattr(first, name) + getattr(second, name)
            for name in ("first_secs", "compute_secs", "overruns", "host_secs", "local_secs")
        }
    )
