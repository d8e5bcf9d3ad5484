"""Which parameters are judged: evaluated and handed out? Of some optimisers not those they train.

`optax.LookaheadParams` say so themselves. Other optimisers say it by their state, which is looked
for in whatever wraps them: schedule-free training judges an average, SAM the point that it
perturbs. The state of an optimiser of one's own may have a method `eval_params(params)`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from hetjax import debugging, types
from hetjax import mesh as mesh_lib


class Point(NamedTuple):
    """Where an optimiser is judged."""

    name: str
    of: Callable[[Any, types.PyTree], types.PyTree]  # `(state, params) -> params`
    held: str = ""  # what the state has of each parameter that the optimiser trains
    told: str = "eval_params of its state"


def _unperturbed(state: Any, params: types.PyTree) -> types.PyTree:
    is_between = state.steps_since_sync > 0
    rest = jax.tree.map(lambda a, b: jnp.where(is_between, a, b), state.cache, params)
    return _judged(rest, state.opt_state)


_POINTS = {
    contrib.ScheduleFreeState: Point(
        "schedule_free", contrib.schedule_free_eval_params, "z", "schedule_free_eval_params"
    ),
    contrib.SAMState: Point("sam", _unperturbed, "cache", "the parameters that it perturbs"),
}


def _point(state: Any) -> Point | None:
    function = getattr(type(state), "eval_params", None)
    return _POINTS.get(type(state)) or (function and Point(type(state).__name__, function))


def _found(opt_state: types.PyTree) -> Iterator[tuple[Point, Any]]:
    for state in jax.tree.leaves(opt_state, is_leaf=lambda node: _point(node) is not None):
        if (point := _point(state)) is not None:
            yield point, state


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _of_state(point: Point, state: Any, params: types.PyTree) -> types.PyTree:
    """The parameters, with those that this state is of at their point; None: of no known form."""
    held = getattr(state, point.held) if point.held else params
    try:
        own = jax.tree.map(
            lambda like, now: like if _is_masked(like) else now, held, params, is_leaf=_is_masked
        )
    except ValueError:
        return None
    if [np.shape(x) for x in jax.tree.leaves(own)] != [np.shape(x) for x in jax.tree.leaves(held)]:
        return None
    return jax.tree.map(
        lambda like, now, at: now if _is_masked(like) else at.astype(now.dtype),
        held,
        params,
        point.of(state, own),
        is_leaf=_is_masked,
    )


def _judged(params: types.PyTree, opt_state: types.PyTree) -> types.PyTree:
    for point, state in _found(opt_state):
        found = _of_state(point, state, params)
        params = params if found is None else found
    return params


_ROW = debugging.compiled(jax.jit(_judged))
_ROWS = debugging.compiled(jax.jit(jax.vmap(_judged)))


def differs(opt_state: types.PyTree) -> bool:
    """Whether the state of an optimiser says where it is judged."""
    return next(_found(opt_state), None) is not None


def of(params: types.PyTree, opt_state: types.PyTree, *, rows: bool = False) -> types.PyTree:
    """What is evaluated and handed out of these parameters; of `optax.LookaheadParams` the slow
    ones, twice.

    Args:
        params: that the optimiser trains.
        opt_state: its state.
        rows: both have leaves `[W, ...]`, else no worker axis.
    """
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams.init_synced(params.slow)
    if not differs(opt_state):
        return params
    return (_ROWS if rows else _ROW)(params, opt_state)


def own(train: types.TrainState) -> types.PyTree:
    """The same of the first worker of this process, without worker axis."""
    opt_state = train.opt_state if differs(train.opt_state) else ()
    return of(*mesh_lib.own_row((train.params, opt_state)))


def told(params: types.PyTree, opt_state: types.PyTree) -> str:
    """What to say of an optimiser that is judged elsewhere; "": nothing. Leaves `[W, ...]`.

    Raises:
        ValueError: a state's own `eval_params` cannot be used.
    """
    said = []
    for point, state in _found(opt_state):
        text = f"evaluated and returned: {point.told}; result.state keeps what it trains"
        try:
            found = jax.eval_shape(jax.vmap(functools.partial(_of_state, point)), state, params)
        except Exception as error:
            raise ValueError(f"optimizer: {point.told}, {point.name}, fails: {error}") from error
        if found is None or isinstance(params, optax.LookaheadParams):
            text = f"{point.told} is not found in such a state; evaluated is what is trained"
        said.append(f"{point.name}: {text}")
    return ". ".join(dict.fromkeys(said))
