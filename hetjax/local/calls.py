"""What a worker's thread calls: a rule's `add` and `finish`, as programs of its own rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hetjax import executor, placement, slices, trees, types
from hetjax import mesh as mesh_lib
from hetjax.data import feed
from hetjax.local import jitted, packing, rules


def jit_adds(steps: rules.LocalSteps, where: placement.Placement, *, marked: bool) -> list[Any]:
    """`steps.add`, jitted, of each own worker, on its rows `[1, ...]` of the parameters and of what
    it carries, which is used up. What it carries may be packed, and is so afterwards. `marked` adds
    a constant to what it returns: it is there when the rest is, and the next call does not use it
    up. The microbatch may be one that the feed has lent."""
    layout = where.layout

    def add(shared: types.Shared, carried: types.Carried, microbatch: Any, rng: jax.Array) -> tuple:
        with slices.seen(layout):
            opened, microbatch = packing.unpack(carried), feed.gathered(microbatch)
            microbatch = slices.spread(microbatch)
            added, signs = steps.add(without_row_axis(shared), opened, microbatch, rng)
        mark = (jnp.zeros((), bool),) if marked else ()
        return packing.pack_like(carried, added), signs, *mark

    if layout is None:
        return [executor.compiled(jax.jit(add, donate_argnums=(1,)))] * len(where.own)

    def program(own: Mesh) -> Any:
        def lay(made: tuple) -> tuple:
            return layout.of_rows(made[0], own), *(mesh_lib.everywhere(own) for _ in made[1:])

        program = jitted.InPlace(add, 1, lay)
        return lambda *given: program.call(*given)

    return [program(own) for own in where.own_meshes]


def jit_finish(steps: rules.LocalSteps, where: placement.Placement) -> list[jitted.InPlace]:
    """`finish`, jitted, of each own worker; it uses up what the worker carries."""
    of_rows, layout = functools.partial(finish, steps), where.layout
    if layout is None:
        return [jitted.InPlace(of_rows, 1)] * len(where.own)
    return [
        jitted.InPlace(of_rows, 1, functools.partial(layout.of_rows, mesh=own))
        for own in where.own_meshes
    ]


def add_eagerly(
    steps: rules.LocalSteps,
    shared: types.Shared,
    carried: types.Carried,
    microbatch: types.Microbatch,
    rng: jax.Array,
) -> tuple[types.Carried, Any]:
    """As one of `jit_adds`, eagerly; the rule is mapped over no axis."""
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
