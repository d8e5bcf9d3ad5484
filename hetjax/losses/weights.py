"""Do the weights of a loss depend on what it is differentiated by, or does it reach them at all?

A mean loss is `sum(w l) / sum(w)`. If its weights are constant, its gradient is that of the
numerator over a number. Else it takes the quotient rule and the gradient of the denominator.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from hetjax import executor
from hetjax.types import PyTree


def depend(function: Callable[..., tuple[Any, PyTree]], point: PyTree, *rest: Any) -> bool:
    """Whether the weights have a derivative by the point. Traces; computes nothing.

    If JAX cannot tell, as with the result of a `jax.custom_vjp`, they count as dependent: that is
    right, but costs more. `jax.lax.stop_gradient` makes weights constant; booleans and integers
    always are.

    Args:
        function: `(point, *rest) -> (losses, weights)`; weights are arrays, or None.
        point: what the loss is differentiated by: arrays, or their shapes.
        rest: its other arguments, likewise.

    Example:
        >>> import jax.numpy as jnp
        >>> depend(lambda x, a: ((x - a) ** 2, 1 / (1 + (x - a) ** 2)), 2.0, jnp.arange(3.0))
        True
        >>> depend(lambda x, a: ((x - a) ** 2, 1 / (1 + a)), 2.0, jnp.arange(3.0))
        False
    """
    seen = []

    @jax.custom_jvp
    def watched(weights: jax.Array) -> jax.Array:
        return weights

    def see(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        seen.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    watched.defjvp(see, symbolic_zeros=True)

    def differentiated(point: PyTree, *rest: Any) -> PyTree:
        return jax.vjp(lambda each: jax.tree.map(watched, function(each, *rest)[1]), point)[0]

    executor.shapes(differentiated, point, *rest)
    return any(seen)


def reached(function: Callable[..., tuple[Any, PyTree]], point: PyTree, *rest: Any) -> bool:
    """Whether the point reaches the weights at all: by `argmax`, a comparison, `stop_gradient`.

    By `jax.vmap`, which follows what is made of a mapped argument into every loop and call. What it
    cannot map counts as reached; a loss that asks for numbers, where it is called, as of `depend`.

    Args:
        function, point, rest: as of `depend`.

    Example:
        >>> reached(lambda x, a: ((x - a) ** 2, x > a), 2.0, jnp.arange(3.0))
        True
        >>> reached(lambda x, a: ((x - a) ** 2, a > 1), 2.0, jnp.arange(3.0))
        False
    """

    def alone(point: PyTree, *rest: Any) -> PyTree:
        return jax.vmap(lambda point: function(point, *rest)[1], out_axes=None)(point)

    try:  # a mapped result has no place there: ValueError
        executor.shapes(alone, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], point), *rest)
    except Exception as error:
        is_told = isinstance(error, ValueError) or not executor.is_eager()
        return is_told or depend(function, point, *rest)
    return False
