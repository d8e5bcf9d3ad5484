"""How does one program serve every learning rate?

A program that holds a learning rate is compiled anew for another one. Here the rate is the last
factor of an update, such as `optax.scale_by_learning_rate` multiplies by. It is taken off the
update's trace, and the program is given it. Other numbers stay in the program: XLA folds constants
that meet, and adds a product in one step or in two, so it would not compute the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from hetjax import debugging, types


def of_update(optimizer: optax.GradientTransformationExtraArgs, params: types.PyTree) -> np.ndarray:
    """The last factors of an update, f64[n], host, each once; none where it cannot be traced.

    Args:
        optimizer: whose update takes `value` and `progress`.
        params: arrays or their shapes, without worker axis.

    Example:
        >>> import optax
        >>> of_update(optax.with_extra_args_support(optax.sgd(0.125)), np.ones(3, np.float32))
        array([-0.125])
    """
    if debugging.is_on():
        return np.zeros(0)
    one = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        grads = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), params)
        state = jax.eval_shape(optimizer.init, grads)
        program, _ = _traced(optimizer, grads, state, grads, {"value": one, "progress": one})
    except Exception:  # the update of the first round says what is wrong
        return np.zeros(0)
    return _each_once(_last_factors(program.jaxpr))


def given(
    optimizer: optax.GradientTransformationExtraArgs, known: np.ndarray, factors: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """The optimiser with an update that multiplies by what it is given; traceable.

    Args:
        optimizer: as for `of_update`.
        known: what `of_update` has found.
        factors: f[n], to multiply by instead. Where the update has others than `known`, it stays
            as it is.
    """

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        program, returned = _traced(optimizer, grads, state, params, extra)
        last = _last_factors(program.jaxpr)
        if not np.array_equal(_each_once(last), known):
            return optimizer.update(grads, state, params, **extra)
        by_value = dict(zip(known.tolist(), factors, strict=True))
        ends = [
            last.get(place, (atom, None))[0] for place, atom in enumerate(program.jaxpr.outvars)
        ]
        before = core.ClosedJaxpr(program.jaxpr.replace(outvars=ends), program.consts)
        made = core.jaxpr_as_fun(before)(*jax.tree.leaves((grads, state, params, extra)))
        for place, (_, factor) in last.items():
            made[place] = made[place] * by_value[factor].astype(made[place].dtype)
        return jax.tree.unflatten(jax.tree.structure(returned), made)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _traced(optimizer: Any, grads: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
    def update(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return optimizer.update(grads, state, params, **extra)

    return jax.make_jaxpr(update, return_shape=True)(grads, state, params, extra)


def _last_factors(jaxpr: Any) -> dict[int, tuple[Any, float]]:
    """What is multiplied last, and by which constant, of each result that a product ends."""
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    found = {}
    for place, atom in enumerate(jaxpr.outvars):
        equation = None if isinstance(atom, core.Literal) else made_by.get(atom)
        if equation is None or equation.primitive.name != "mul":
            continue
        literals = [a for a in equation.invars if isinstance(a, core.Literal)]
        others = [a for a in equation.invars if not isinstance(a, core.Literal)]
        if len(others) != 1 or _has_constant(made_by.get(others[0])):
            continue
        if abs(factor := float(literals[0].val)) != 1:  # XLA makes a sign of -1
            found[place] = others[0], factor
    return found


def _has_constant(equation: Any) -> bool:
    """Whether a product of it with a constant would be folded."""
    is_literal = (isinstance(atom, core.Literal) for atom in getattr(equation, "invars", ()))
    return any(is_literal)


def _each_once(last: dict[int, tuple[Any, float]]) -> np.ndarray:
    return np.array(list(dict.fromkeys(factor for _, factor in last.values())), float)
