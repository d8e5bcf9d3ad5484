"""Does what the adapters get fit the model, and if it does not, what was meant?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from hetjax import debugging, parts
from hetjax.losses import stateful

CHANGES = (
    "The model keeps state of its own: a call of it changes {where}, neither parameters nor model "
    "state nor random streams. So the new values would be lost. "
    "{hint}To see a number of each example, return it: hetjax.Losses(losses, metrics={{name: "
    "f32[B]}}); to have the state fixed, do not change it in training."
)
_MOST_NAMED = 4


def named(names: Any) -> str:
    """The first few names, for a message."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def dotted(path: Any) -> str:
    """A path of keys as text, without the attributes of a variable."""
    keys = [key for key in path if not isinstance(key, jax.tree_util.GetAttrKey)]
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def check_function(caller: str, function: Any, what: str) -> None:
    """Refuses what is no function `(model, batch)`.

    Args:
      caller: the adapter.
      function: what it got.
      what: the function is to return.

    Raises:
      ValueError: it is no such function.
    """
    if callable(function) and parts.takes(function, 2):
        return
    raise ValueError(
        f"{caller}: the function is {parts.shown(function)}, which does not take two arguments; "
        f"it must be a function (model, batch) -> {what}"
    )


def check_loss(caller: str, function: Any) -> bool:
    """Whether a loss wants the mask of its examples, `(model, batch, mask)`; refuses any other.

    Raises:
      ValueError: it is no function `(model, batch)` either.
    """
    if callable(function) and parts.takes(function, 3) and not parts.takes(function, 2):
        return True
    check_function(caller, function, "losses f32[B]")
    return False


def check_no_mask(caller: str, *, takes_mask: bool) -> None:
    """Refuses a loss that wants the mask of a model without state.

    Raises:
      ValueError: it does.
    """
    if takes_mask:
        raise ValueError(
            f"{caller}: the function takes a mask, which is for statistics of a microbatch, and "
            "the model keeps no state; it must be a function (model, batch) -> losses f32[B]. "
            "Losses of padding are left out in any case"
        )


def stateful_loss(function: Callable[..., Any], state: Any, *, takes_mask: bool) -> Any:
    """A `StatefulLoss` of `(params, state, batch, key, *mask) -> (losses, new state)`."""

    def checked(params: Any, state: Any, batch: Any, rng: jax.Array, *mask: Any) -> Any:
        if not is_one_key(rng):
            raise ValueError(
                "per_example_rng: a key for each example would call the model with one example, "
                "and its state is made of all of a microbatch; leave per_example_rng out"
            )
        return function(params, state, batch, rng, *mask)

    def with_mask(params: Any, state: Any, batch: Any, rng: jax.Array, mask: Any) -> Any:
        return checked(params, state, batch, rng, mask)

    def without(params: Any, state: Any, batch: Any, rng: jax.Array) -> Any:
        return checked(params, state, batch, rng)

    return stateful.StatefulLoss(with_mask if takes_mask else without, state)


def check_one_example_loss(caller: str, function: Any) -> None:
    """Refuses what is no function `(params, example, rng)`.

    Raises:
      ValueError: it is no such function.
    """
    if callable(function) and parts.takes(function, 3):
        return
    raise ValueError(
        f"{caller}: the function is {parts.shown(function)}, which does not take three arguments; "
        "it must be a function (params, example, rng) -> loss f[] or (loss, weight), of one example"
    )


def check_model(caller: str, model: Any, function: Any, wanted: type) -> None:
    """Refuses what is no model of `wanted`, `nnx.Module` or `linen.Module`, and swapped arguments.

    Raises:
      ValueError: it is no such model. The message says what was meant, as far as can be seen.
    """
    is_nnx = wanted is nnx.Module
    if isinstance(model, wanted):
        return
    if not is_nnx and hasattr(model, "apply") and not isinstance(model, (type, nnx.Module)):
        return  # it is called like a module of Linen, whoever made it
    kind, other = ("NNX", "Linen") if is_nnx else ("Linen", "NNX")
    first = "model" if is_nnx else "module, variables"
    if isinstance(function, wanted):
        hint = f"The arguments are in another order: {caller}({first}, function)"
    elif isinstance(model, (linen.Module, nnx.Module)):
        instead = caller.replace("nnx", "linen") if is_nnx else caller.replace("linen", "nnx")
        others = "module, variables" if is_nnx else "model"
        hint = f"It is a module of Flax {other}: hetjax.{instead}({others}, function)"
    elif isinstance(model, type):
        made = "(…, rngs=nnx.Rngs(0))" if is_nnx else "(…)"
        hint = f"Give a module made of it: {caller}({model.__name__}{made}, …)"
    else:
        hint = "Another model needs no adapter: write loss_fn(params, batch, rng) -> losses f32[B]"
    raise ValueError(f"{caller}: got {parts.shown(model)} for a module of Flax {kind}. {hint}")


def check_params(caller: str, given: Any, expected: Any, name: str = "params") -> None:
    """Refuses parameters that are not those of the model.

    Args:
      caller: the adapter.
      given: parameters.
      expected: those of the model.
      name: what they are: `params`, or `model_state`.

    Raises:
      ValueError: names or shapes differ. The message says which.
    """
    theirs, own = _shapes(given), _shapes(expected)
    if theirs == own:
        return
    lines = [f"{path} is missing" for path in own if path not in theirs]
    lines += [f"{path} is of no variable of it" for path in theirs if path not in own]
    lines += [
        f"{path} has shape {theirs[path]}, must be {own[path]}"
        for path in own
        if path in theirs and theirs[path] != own[path]
    ]
    inner = given.get("params") if isinstance(given, Mapping) else None
    if inner is not None and _shapes(inner) == own:
        raise ValueError(
            f"{caller}: params are all variables of the model; of these give variables['params']"
        )
    raise ValueError(
        f"{caller}: {name} do not fit the model: {named(lines)}. Pass the {name} of one worker "
        "(without the worker axis) of this same model, and the same wrt as to the loss"
    )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    paths = jax.tree.leaves_with_path(params)
    return {dotted(path): jnp.shape(leaf) for path, leaf in paths}


def by_key(losses: Callable[[Any, jax.Array], Any], batch: Any, rng: jax.Array) -> Any:
    """Calls `losses` with the batch and its key, or example by example with a key for each.

    Raises:
      ValueError: called with one example, it returned something that is not one loss.
    """
    if is_one_key(rng):
        return losses(batch, rng)

    def first(leaf: jax.Array) -> jax.Array:
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != 1:
            raise ValueError(
                f"the loss returned {leaf.dtype}{list(jnp.shape(leaf))} for a batch of 1 example; "
                "it must return one number an example, [1] here. Leave out the last .mean()"
            )
        return leaf[0]

    def one(example: Any, key: jax.Array) -> Any:
        of_one = jax.tree.map(lambda leaf: leaf[None], example)
        return jax.tree.map(first, losses(of_one, key))

    return debugging.each(one, batch, rng)


def is_one_key(rng: jax.Array) -> bool:
    """Whether `rng` is one key, typed or raw, and no array of keys."""
    return jnp.ndim(rng) == (0 if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else 1)


def fold(key: jax.Array, index: int) -> jax.Array:
    """A key of its own for each index."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.random.fold_in(key, index)
