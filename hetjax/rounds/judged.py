"""Which parameters are judged: evaluated and handed out? Of some optimisers not those they train.

`optax.LookaheadParams` say so themselves. Other optimisers say it by their state, which is looked
for in whatever wraps them: schedule-free training judges an average, SAM the point that it
perturbs. The state of an optimiser of one's own may have a method `eval_params(params)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from hetjax import executor, types


def unperturbed_params(state: Any, params: types.PyTree) -> types.PyTree:
    between = state.steps_since_sync > 0
    rest = jax.tree.map(lambda a, b: jnp.where(between, a, b), state.cache, params)
    return row(rest, state.opt_state)


# By the state: its point, and the field that holds a leaf for each parameter that is trained.
_POINTS: dict[type, tuple[Any, str]] = {
    contrib.ScheduleFreeState: (contrib.schedule_free_eval_params, "z"),
    contrib.SAMState: (unperturbed_params, "cache"),
}


def _point(state: Any) -> tuple[Any, str]:
    return _POINTS.get(type(state), (getattr(type(state), "eval_params", None), ""))


def _says(state: Any) -> bool:
    return _point(state)[0] is not None


def found(opt_state: types.PyTree) -> list[Any]:
    """The states in it, whatever wraps them, that say where an optimiser is judged."""
    return [state for state in jax.tree.leaves(opt_state, is_leaf=_says) if _says(state)]


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _at(state: Any, params: types.PyTree) -> types.PyTree:
    """The parameters, those that this state is of at their point; None: it is of other shapes."""
    point, field = _point(state)
    held = getattr(state, field, params)
    try:
        own = jax.tree.map(lambda a, b: a if _masked(a) else b, held, params, is_leaf=_masked)
    except ValueError:
        return None
    if [np.shape(x) for x in jax.tree.leaves(own)] != [np.shape(x) for x in jax.tree.leaves(held)]:
        return None

    def choose(mask: Any, now: Any, at: Any) -> Any:
        return now if _masked(mask) else at.astype(now.dtype)

    return jax.tree.map(choose, held, params, point(state, own), is_leaf=_masked)


def row(params: types.PyTree, opt_state: types.PyTree) -> types.PyTree:
    """As `of`, without worker axis."""
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams.init_synced(params.slow)
    for state in found(opt_state):
        at = _at(state, params)
        params = params if at is None else at
    return params


_ROWS = executor.compiled(jax.jit(jax.vmap(row)))


def of(params: types.PyTree, opt_state: types.PyTree) -> types.PyTree:
    """What is evaluated and handed out of the parameters that an optimiser trains, leaves
    `[W, ...]`: of `optax.LookaheadParams` the slow ones, twice."""
    return _ROWS(params, opt_state) if found(opt_state) else row(params, ())


def told(params: types.PyTree, opt_state: types.PyTree) -> str:
    """What to say of an optimiser that is judged elsewhere; "": nothing. Leaves `[W, ...]`."""
    states = found(opt_state)
    each = [f"{_point(state)[0].__name__} of {type(state).__name__}" for state in states]
    names = ", ".join(dict.fromkeys(each))
    if isinstance(params, optax.LookaheadParams) or any(
        jax.eval_shape(jax.vmap(_at), state, params) is None for state in states
    ):
        return names and f"{names} is not found in such a state; evaluated is what is trained"
    return names and f"evaluated and returned: {names}; result.state keeps what is trained"
