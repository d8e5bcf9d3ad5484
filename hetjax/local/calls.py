"""What a worker's thread calls: a rule's `add` and `finish`, as programs of its own rows."""

from typing import Any

import jax
import jax.numpy as jnp

from hetjax import executor, trees, types
from hetjax.data import feed
from hetjax.local import packing, rules


def jit_add(steps: rules.LocalSteps, *, marked: bool = False) -> Any:
    """`steps.add`, jitted, on a worker's rows `[1, ...]` of the parameters and of what it carries,
    which is used up. What it carries may be packed, and is so afterwards. `marked` adds a constant
    to what it returns: it is there when the rest is, and the next call does not use it up. The
    microbatch may be one that the feed has lent."""

    def add(shared: types.Shared, carried: types.Carried, microbatch: Any, rng: jax.Array) -> tuple:
        opened, microbatch = packing.unpack(carried), feed.gathered(microbatch)
        added, signs = steps.add(without_row_axis(shared), opened, microbatch, rng)
        mark = (jnp.zeros((), bool),) if marked else ()
        return packing.pack_like(carried, added), signs, *mark

    return executor.compiled(jax.jit(add, donate_argnums=(1,)))


def add_eagerly(
    steps: rules.LocalSteps,
    shared: types.Shared,
    carried: types.Carried,
    microbatch: types.Microbatch,
    rng: jax.Array,
) -> tuple[types.Carried, Any]:
    """As `jit_add`, eagerly; the rule is mapped over no axis."""
    with executor.of(executor.EAGER):
        shared, own = without_row_axis(shared), trees.first_row(carried)
        added, signs = steps.add(shared, own, microbatch, rng)
        return trees.add_row_axis(added), signs


def finish(
    steps: rules.LocalSteps, shared: types.Shared, carried: types.Carried
) -> types.Contribution:
    """`steps.finish` of a worker's rows; packed where what it carries is."""
    contributed = steps.finish(without_row_axis(shared), packing.unpack(carried))
    return packing.pack_like(carried, contributed)


def without_row_axis(shared: types.Shared) -> types.Shared:
    """The values for one worker, of its rows `[1, ...]`."""
    rows = shared.params, shared.model_state, shared.named.values
    params, model_state, values = trees.first_row(rows)
    return types.Shared(params, shared.given, model_state, shared.named._replace(values=values))
