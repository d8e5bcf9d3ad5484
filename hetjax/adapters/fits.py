"""Does what the adapters get fit the model, and if it does not, what was meant?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax import executor, parts, trees
from hetjax.losses import forwarding, stateful
from hetjax.losses import named as named_lib

PerExampleFn = Callable[[Any, Any], Any]
LossFn = Callable[[Any, Any, jax.Array], Any]
MetricsFn = Callable[..., Any]
CHANGES = "The model keeps state of its own: a call of it changes {where}, which is lost. {hint}"
_MOST_NAMED = 4


def named(names: Any) -> str:
    """The first few names, for a message."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def dotted(path: Any) -> str:
    """A path of keys as text, without the attributes of a variable."""
    keys = tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def loss_of(
    caller: str,
    call: Callable[..., Any],
    state: Any,
    frozen: Any,
    function: Callable[..., Any],
    *,
    streams: Sequence[str],
    rngs_of: Callable[[jax.Array], Any] | None = None,
    specs: Any = (),
) -> Any:
    """The loss of a model: `(params, batch, rng) -> losses`, or of one with state a `StatefulLoss`.

    Args:
      caller: the adapter.
      call: `(params, state, keys, asked) -> (asked(model), new state)`, with a key a stream.
      state: of the model, at the beginning.
      frozen: what else the model has, and training does not change.
      function: the user's, `(model, batch)` and what it names: `rngs`, `rng`, and of
        `named.NAMES`.
      streams: names of the model's random streams.
      rngs_of: from a key to what the function gets as `rngs`; None: a key a stream.
      specs: of the model's variables, as `slices.layout` takes them.

    Raises:
      ValueError: it takes a mask by place, and the model keeps no state.
    """
    keeps_state = bool(jax.tree.leaves(state))
    function = named_lib.giving(function, 2)
    names = parts.asked_for(function, ("rngs", "rng"))
    by_place = not parts.takes(function, 2, *names)  # a mask of any name
    if by_place and not keeps_state:
        raise ValueError(f"{caller}: the function takes a mask or more; the model keeps no state")

    def keys_of(key: jax.Array) -> dict[str, jax.Array]:
        return {name: fold(key, index) for index, name in enumerate(streams)}

    def losses_of(params: Any, state: Any, batch: Any, key: jax.Array, *mask: Any) -> Any:
        if (streams or names) and not is_one_key(key):

            def after(state: Any) -> Any:
                return losses_of(params, state, batch, key[0], *mask)[1]

            def of_one(given: Any, key: jax.Array) -> Any:
                return losses_of(params, state, given[0], key, *given[1:])[0]

            if keeps_state and any(forwarding.changed(after, state)):
                raise ValueError(f"{caller}: with per_example_rng no call may change the state")
            return each_key(of_one, (batch, *mask), key), state

        values: dict[str, Callable[[], Any]] = {
            "rngs": lambda: (rngs_of or keys_of)(fold(key, len(streams))),
            "rng": lambda: fold(key, len(streams) + 1),
        }

        def asked(model: Any) -> Any:
            return function(model, batch, *mask, **{name: values[name]() for name in names})

        return call(params, state, keys_of(key), asked)

    def with_mask(params: Any, state: Any, batch: Any, rng: jax.Array, mask: Any) -> Any:
        return losses_of(params, state, batch, rng, mask)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        return losses_of(params, state, batch, rng)[0]

    made: Any = (with_mask if by_place else losses_of) if keeps_state else loss_fn
    made = carrying(made, function, frozen)
    made.specs = dict(jax.tree.leaves_with_path(specs))
    return stateful.StatefulLoss(made, state) if keeps_state else made


def carrying(made: Any, function: Any, frozen: Any) -> Any:
    """What an adapter made of a user's function, with what this asks for and a model has."""
    made.asks = getattr(function, "asks", ())
    made.frozen = frozen if jax.tree.leaves(frozen) else None
    return made


def metrics_of(call: Callable[..., Any], state: Any, frozen: Any, function: Any) -> MetricsFn:
    """`call(params, state, batch)`, or without the state where the model keeps none."""

    def without_state(params: Any, batch: Any) -> Any:
        return call(params, state, batch)

    return carrying(call if jax.tree.leaves(state) else without_state, function, frozen)


def check_model(caller: str, model: Any, wanted: type) -> None:
    """Refuses what is no model of `wanted`, `nnx.Module` or `linen.Module`.

    Raises:
      ValueError: it is no such model.
    """
    if isinstance(model, wanted):
        return
    is_nnx = wanted is nnx.Module
    if not is_nnx and hasattr(model, "apply") and not isinstance(model, (type, nnx.Module)):
        return  # it is called like a module of Linen, whatever made it
    kind = "NNX" if is_nnx else "Linen"
    raise ValueError(f"{caller}: got {parts.shown(model)}; give a module of Flax {kind}")


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
    lines = [
        f"{path} is {theirs.get(path, 'missing')}, must be {own.get(path, 'left out')}"
        for path in own | theirs
        if theirs.get(path) != own.get(path)
    ]
    raise ValueError(
        f"{caller}: {name} do not fit the model: {named(lines)}; give those of one worker, and the "
        "same wrt"
    )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {dotted(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}


def each_key(losses: Callable[[Any, jax.Array], Any], batch: Any, keys: jax.Array) -> Any:
    """Calls `losses` example by example, with a key for each.

    Raises:
      ValueError: called with one example, it returned something that is not one loss.
    """

    def first(leaf: jax.Array) -> jax.Array:
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != 1:
            raise ValueError(
                f"the loss returned {leaf.dtype}{list(jnp.shape(leaf))} for 1 example; it must "
                "return one number an example. Leave out the last .mean()"
            )
        return leaf[0]

    def one(example: Any, key: jax.Array) -> Any:
        return jax.tree.map(first, losses(trees.add_row_axis(example), key))

    return executor.each(one, batch, keys)


def is_one_key(rng: jax.Array) -> bool:
    """Whether `rng` is one key, typed or raw, and no array of keys."""
    return jnp.ndim(rng) == (0 if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else 1)


def fold(key: jax.Array, index: int) -> jax.Array:
    """A key of its own for each index."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.random.fold_in(key, index)
