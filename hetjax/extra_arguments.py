"""What an optimiser's update is given beside gradients, and by what it is known again."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax import digests, types

TOLD = ("value", "progress", "mean_steps", "mean_examples")
"""What an update is told of its round, f32[] each: the mean loss, the nominal rounds of the run
that are done, and what a worker that took part did in the mean."""

OTHERWISE = "the optimizer updates otherwise: another kind, learning rate or setting"


class Asked(optax.GradientTransformationExtraArgs):
    """An optimiser that is given only what it takes."""

    plain: optax.GradientTransformation
    """The optimiser itself."""

    arguments: Callable[..., tuple[types.PyTree, dict[str, Any]]]
    """`(grads, state, params, **extra) -> (grads, extra)`, as its update takes them."""


def with_extra_arguments(optimizer: optax.GradientTransformation) -> Asked:
    """Any optimiser as one that may be given what `TOLD` names.

    Its first update is tried by shapes: what any function in it refuses is kept from it. Of
    `optax.LookaheadParams` it is given the gradients of the fast ones.
    """
    if isinstance(optimizer, Asked):
        return optimizer
    asked: set[str] = set()
    refused: set[str] = set()

    def arguments(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(params, optax.LookaheadParams):
            grads = grads.fast
        if not asked.issuperset(extra):
            refused.update(_refused(optimizer.update, grads, state, params, extra))
            asked.update(extra)
        return grads, {name: value for name, value in extra.items() if name not in refused}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        grads, extra = arguments(grads, state, params, **extra)
        return optimizer.update(grads, state, params, **extra)

    made = Asked(optimizer.init, update)
    made.plain, made.arguments = optimizer, arguments
    return made


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
    # What an update is given; the types, not the numbers.
    number = jax.ShapeDtypeStruct((), jnp.float32)
    extended = with_extra_arguments(optimizer)

    def step(grads: types.PyTree, state: Any, params: types.PyTree, number: Any) -> Any:
        return extended.update(grads, state, params, **dict.fromkeys(TOLD, number))

    state = jax.eval_shape(optimizer.init, params)
    return digests.of_programs((optimizer.init, (params,)), (step, (params, state, params, number)))
