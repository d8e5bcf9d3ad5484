"""What an optimiser's update is given beside gradients, and by what it is known again."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax import digests, types

OTHERWISE = "the optimizer updates otherwise: another kind, learning rate or setting"


class _Asked(optax.GradientTransformationExtraArgs):
    """An optimiser that is given what it takes alone."""


def with_extra_arguments(
    optimizer: optax.GradientTransformation, params: types.PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """Any optimiser as one that may be given `value` and `progress`.

    Its first update is tried by shapes: what any function in it refuses is kept from it. Of
    `optax.LookaheadParams` it is given the gradients of the fast ones. Where `params` are known,
    and the update takes nothing more by its signature, it is Optax's own such optimiser.
    """
    if isinstance(optimizer, _Asked):
        return optimizer
    is_pair = params is None or isinstance(params, optax.LookaheadParams)
    if not is_pair and not _takes_more(optimizer):
        return _Asked(*optax.with_extra_args_support(optimizer))
    asked: set[str] = set()
    refused: set[str] = set()

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if isinstance(params, optax.LookaheadParams):
            grads = grads.fast
        if not asked.issuperset(extra):
            refused.update(_refused(optimizer.update, grads, state, params, extra))
            asked.update(extra)
        extra = {name: value for name, value in extra.items() if name not in refused}
        return optimizer.update(grads, state, params, **extra)

    return _Asked(optimizer.init, update)


def _takes_more(optimizer: optax.GradientTransformation) -> bool:
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return True
    parameters = inspect.signature(optimizer.update).parameters.values()
    return len(parameters) > 3 or any(each.kind is each.VAR_KEYWORD for each in parameters)


def _refused(update: Any, grads: Any, state: Any, params: Any, extra: dict[str, Any]) -> set[str]:
    """Names of what no update can be given; wrappers take anything and hand it on."""
    found: set[str] = set()
    while len(found) < len(extra):
        given = {name: value for name, value in extra.items() if name not in found}
        try:
            jax.eval_shape(update, grads, state, params, **given)
        except Exception as error:  # the update that follows says any other reason
            name = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if not isinstance(error, TypeError) or name is None or name[1] not in given:
                break
            found.add(name[1])
        else:
            break
    return found


def digest(optimizer: optax.GradientTransformation, params: types.PyTree) -> str:
    """Of what an optimiser computes, with all constants in it; `params` by their shapes."""
    # The value and the progress that an update is given; their types, not their numbers.
    number = jax.ShapeDtypeStruct((), jnp.float32)
    extended = with_extra_arguments(optimizer)

    def step(grads: types.PyTree, state: Any, params: types.PyTree, number: Any) -> Any:
        return extended.update(grads, state, params, value=number, progress=number)

    state = jax.eval_shape(optimizer.init, params)
    return digests.of_programs((optimizer.init, (params,)), (step, (params, state, params, number)))
