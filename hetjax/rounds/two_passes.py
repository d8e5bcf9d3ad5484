"""A round whose loss is over all of its examples does two passes of one plan.

The first gathers embeddings, the second pulls the gradient of the loss in them back through each
microbatch. `embeddings` has the rules of both, and what is between them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hetjax import debugging, types
from hetjax.local import packing, stepped
from hetjax.rounds import gathering, run_state


def execute(
    run: Any,
    plan: run_state.Plan,
    *,
    request: gathering.Request = gathering.Request.NOTHING,
    meanwhile: Callable[[], None] = lambda: None,
) -> run_state.Executed:
    """Both passes of a round of a `Run`; arguments and result as of `Run.execute`.

    A gate may close the first one. The second does what the first has done.

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
    first = run.add_up(of_first, params, types.Kept(), meanwhile=meanwhile)
    limits = first.work.microbatches_done
    done = np.full_like(ids, -1)
    for worker, count in enumerate(limits):
        start = plan.assigned.starts[worker]
        done[start : start + count] = ids[start : start + count]
    counted = packing.unpack(jax.device_get(first.sums.metrics))
    is_finite = bool(np.all(counted.nonfinite_microbatch < 0))
    with debugging.eager(run.config.debug):
        handed = passes.handed(params, first.sums.mean, done, is_finite=is_finite)
    run.clock.closes()
    of_second = plan._replace(limits=limits, may_close=False, closing=None)
    second = run.execute_pass(of_second, handed, request=request)
    return second._replace(plan=plan, work=_both(first.work, second.work))


def _both(first: stepped.Work, second: stepped.Work) -> stepped.Work:
    """The work of a round of two passes: their times add up."""
    return second._replace(
        **{
            name: getattr(first, name) + getattr(second, name)
            for name in ("first_secs", "compute_secs", "overruns", "host_secs", "local_secs")
        }
    )
