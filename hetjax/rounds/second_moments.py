"""What does the optimiser know of the size of each coordinate's gradients?

Adam divides a gradient's mean by √v̂, with v̂ the running mean of its square. An order that is to
balance what moves the parameters needs the same v̂. It is read where optax keeps it, in `nu` of a
state, through chains, masks, partitions and injected hyperparameters. The state does not hold the
decay b2, by which v̂ = nu / (1 - b2**count): so the optimiser is asked once, by updates of zeros.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax import trees, types
from hetjax.ordering import ordering
from hetjax.rounds import update as update_lib

_EPS = 1e-8  # optax's for Adam; the state does not hold it


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "counts"],
    meta_fields=["state_of", "decays", "structure"],
)
@dataclasses.dataclass(frozen=True)
class SecondMoments:
    """Running means of squared gradients, as the optimiser keeps them; arrays of its own."""

    values: list[jax.Array]  # for each of the parameters' leaves, of its shape
    counts: list[Any]  # of each state: i32[], the updates so far; () where nothing is corrected
    state_of: tuple[int, ...]  # for each leaf, whose count and decay are its
    decays: tuple[float, ...]  # of each state
    structure: Any  # of the parameters

    def scale(self) -> types.PyTree:
        """1 / (√v̂ + 1e-8), like the parameters, in float32 or wider.

        It is 1 where v̂ is 0: everywhere before the first update, and later where no gradient has
        been yet, such as the embedding of a word that no batch had.
        """
        scales = []
        for value, index in zip(self.values, self.state_of, strict=True):
            moment = value.astype(trees.wider(value.dtype, jnp.float32))
            if not isinstance(self.counts[index], tuple):
                count = self.counts[index].astype(moment.dtype)
                moment = moment / jnp.where(count > 0, 1 - self.decays[index] ** count, 1)
            scales.append(jnp.where(moment > 0, 1 / (jnp.sqrt(moment) + _EPS), 1))
        return jax.tree.unflatten(self.structure, scales)


Reader = Callable[[types.PyTree], SecondMoments]


def reader(optimizer: optax.GradientTransformation | None, params: types.PyTree) -> Reader:
    """`opt_state -> SecondMoments`: where they are in the states of this optimiser.

    Args:
        optimizer: whose states they are; None: of a run without updates.
        params: the parameters, or their shapes, without worker axis.

    Returns:
        a function that computes nothing; leaves of the state may have any leading axes.

    Raises:
        ValueError: it keeps no mean of squares, or not one for each parameter.
    """
    if optimizer is None:
        raise ValueError(_refused("a run without an optimiser has no second moments"))
    shapes = jax.eval_shape(lambda: params)
    leaves = jax.tree.leaves_with_path(shapes)
    states = _states(jax.eval_shape(optimizer.init, shapes))
    if not states:
        raise ValueError(
            _refused(
                "the optimiser keeps no second moments: its state has no 'nu', the running mean "
                "of squared gradients"
            )
        )
    found = [_positions(state) for state in states]
    places = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        of_leaf = [
            (i, at[name][0])
            for i, at in enumerate(found)
            if name in at and at[name][1] == leaf.shape
        ]
        if len(of_leaf) != 1:
            kept = f"{len(of_leaf)} second moments" if of_leaf else "no second moment"
            raise ValueError(
                _refused(f"the optimiser keeps {kept} ('nu') of the parameter {name or 'given'}")
            )
        places += of_leaf
    decays = _decays(optimizer, shapes)
    structure = jax.tree.structure(shapes)

    def read(opt_state: types.PyTree) -> SecondMoments:
        own = _states(opt_state)
        moments = [jax.tree.leaves(_moments(state)) for state in own]
        return SecondMoments(
            values=[moments[i][position] for i, position in places],
            counts=[_count(state) for state in own],
            state_of=tuple(i for i, _ in places),
            decays=decays,
            structure=structure,
        )

    return read


def attach(
    observer: ordering.Observer | None,
    optimizer: optax.GradientTransformation | None,
    params: types.PyTree,
) -> ordering.Observer | None:
    """The observer, which reads the moments of this optimiser where it is `preconditioned`.

    Raises:
        ValueError: as `reader`.
    """
    if observer is None or not observer.preconditioned:
        return observer
    return observer._replace(read_moments=reader(optimizer, params))


def _refused(why: str) -> str:
    return (
        f"ordering.precondition: {why}. The order is to balance gradients divided by the root of "
        "the optimiser's second moments: take one that keeps them for all parameters, such as "
        "optax.adam, optax.adamw or optax.rmsprop, or ordering.precondition=False"
    )


def _keeps_moments(node: Any) -> bool:
    return "nu" in getattr(node, "_fields", ())  # of a NamedTuple


def _states(opt_state: types.PyTree) -> list[Any]:
    nodes = jax.tree.leaves(opt_state, is_leaf=_keeps_moments)
    return [node for node in nodes if _keeps_moments(node)]


def _moments(state: Any) -> types.PyTree:
    """What it divides by; `nu_max`, of AMSGrad, is corrected already."""
    return getattr(state, "nu_max", state.nu)


def _count(state: Any) -> Any:
    corrects = "count" in state._fields and "nu_max" not in state._fields
    return state.count if corrects else ()


def _positions(state: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    """By the parameter's path, where its moment is among the state's, and its shape."""
    leaves = jax.tree.leaves_with_path(_moments(state))
    return {
        jax.tree_util.keystr(path): (position, leaf.shape)
        for position, (path, leaf) in enumerate(leaves)
    }


def _decays(optimizer: optax.GradientTransformation, shapes: types.PyTree) -> tuple[float, ...]:
    """What part of its second moments each state keeps in an update.

    Raises:
        ValueError: a state's `nu` is no running mean of squares.
    """
    update = update_lib.with_extra_arguments(optimizer).update
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    small = min(1e-3, 1e-2 / math.sqrt(max(num_params, 1)))  # nothing clips it

    def like(value: float) -> types.PyTree:  # of bfloat16 a decay of .999 would be 1
        return jax.tree.map(
            lambda x: jnp.full(x.shape, value, trees.wider(x.dtype, jnp.float32)), shapes
        )

    def after(moment: float, gradient: float) -> list[jax.Array]:
        """f[2] of each state: the least and the largest moment after an update."""

        def begin(node: Any) -> Any:
            if not _keeps_moments(node):
                return node
            return node._replace(nu=jax.tree.map(lambda x: jnp.full_like(x, moment), node.nu))

        zeros, none = like(0.0), jnp.zeros((), jnp.float32)
        state = jax.tree.map(begin, optimizer.init(zeros), is_leaf=_keeps_moments)
        _, state = update(like(gradient), state, zeros, value=none, progress=none)
        ends = []
        for node in _states(state):
            leaves = [jnp.ravel(x).astype(jnp.result_type(float)) for x in jax.tree.leaves(node.nu)]
            flat = jnp.concatenate(leaves or [jnp.full(1, jnp.nan)])
            ends.append(jnp.stack([jnp.min(flat), jnp.max(flat)]))
        return ends

    try:
        with jax.ensure_compile_time_eval():
            probe = jax.jit(lambda: (after(1.0, 0.0), after(0.0, small), after(0.0, 2 * small)))
            kept, once, twice = jax.device_get(probe())
    except Exception as error:  # whatever the optimiser raises
        reason = str(error).strip().split("\n")[0]
        raise ValueError(_refused(f"the optimiser could not be tried: {reason}")) from error
    states = _states(jax.eval_shape(optimizer.init, shapes))
    for state, (least, largest), (_, one), (_, other) in zip(
        states, kept, once, twice, strict=True
    ):
        name = type(state).__name__
        if not jax.tree.leaves(state.nu):  # of a group without members
            continue
        decays = least == largest and 0 < least < 1
        is_linear = 0 < 1.5 * one < other < 3 * one  # of Adamax; by squares 4, where clipped 1
        if not decays or is_linear or name.startswith("ScaleByRStdDev"):
            raise ValueError(
                _refused(
                    f"'nu' of the optimiser's {name} is not the running mean of squared gradients "
                    "that it divides by"
                )
            )
    return tuple(float(least) for least, _ in kept)
