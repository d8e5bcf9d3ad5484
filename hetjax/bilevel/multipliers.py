"""How much a value gap weighs: the multiplier of `f(x, y) - min f(x, .)` beside the upper loss."""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Number = float | Callable[[Any], Any]
"""A number, or a function of the number of hypergradients so far, f[]."""


class Multiplier(NamedTuple):
    """A record of pure functions.

    Attributes:
        of: `(count, gap) -> f[]`; `gap` is f(x, y) - f(x, z), z the minimum that was reached.
        needs_gap: it depends on the gap, which takes one loss more.
        is_barrier: it is infinite if the gap is `shift(count)` or more; y has to stay below.
        shift: `count -> f[]`, of a barrier: how far above the minimum it stands.
        ridge: `count -> f[]`: half of it times `|z|^2` is added to the lower loss of z.
        upper_ridge: the same, to the upper loss of y.
        pull: if given, the multiplier is computed from the gradients at one point (`dynamic`).
    """

    of: Callable[[Any, Any], jax.Array]
    needs_gap: bool = False
    is_barrier: bool = False
    shift: Callable[[Any], Any] = lambda count: 0.0
    ridge: Callable[[Any], Any] = lambda count: 0.0
    upper_ridge: Callable[[Any], Any] = lambda count: 0.0
    pull: float | None = None


def const(value: float) -> Multiplier:
    """Always the same: the hypergradient of the implicit family, damped by its inverse.

    Args:
        value: above 0.

    Returns:
        What `value_gap` takes as `multiplier`.

    Raises:
        ValueError: `value` is no positive number.
    """
    is_traced = isinstance(value, jax.core.Tracer)
    if not is_traced and not (isinstance(value, Real | jax.Array) and value > 0):
        raise ValueError(f"multiplier: got {value!r}; give a positive number, or such as growing()")
    return growing(value)


def growing(value: Number) -> Multiplier:
    """Any function of the number of hypergradients so far: `lambda k: 10 * (k + 1) ** 0.3`.

    Args:
        value: a number, or a function of the count of hypergradients before this one, i32[].

    Returns:
        What `value_gap` takes as `multiplier`.
    """
    at = _function(value)
    return Multiplier(lambda count, gap: jnp.asarray(at(count)))


def ramp(start: float, stop: float, num_steps: int) -> Multiplier:
    """Goes linearly from start to stop in so many hypergradients, and stays at stop.

    Args:
        start: at the first hypergradient.
        stop: from hypergradient `num_steps` on.
        num_steps: hypergradients, at least 1.

    Returns:
        What `value_gap` takes as `multiplier`.
    """
    return growing(lambda k: start + (stop - start) * jnp.minimum(k / num_steps, 1.0))


def exterior(sigma: Number, *, shift: Number = 0.0, ridge: Number = 0.0) -> Multiplier:
    """`max(gap - shift, 0) / sigma`, of the exterior penalty `(f - f* - shift)^2 / (2 sigma)`.

    Args:
        sigma: divides the excess; a number or a function of the count, falls to 0.
        shift: how far the lower loss may be above its minimum at no cost.
        ridge: mu of the lower loss, `mu / 2 |z|^2`.

    Returns:
        What `value_gap` takes as `multiplier`.
    """
    at, beyond = _function(sigma), _function(shift)
    return Multiplier(
        lambda count, gap: jnp.maximum(gap - beyond(count), 0) / at(count),
        True,
        shift=beyond,
        ridge=_function(ridge),
    )


def barrier(
    sigma: Number, shift: Number, *, ridge: Number = 0.0, upper_ridge: Number = 0.0
) -> Multiplier:
    """`sigma / (shift - gap)`, of the barrier `-sigma ln(f* + shift - f)`.

    A step that crosses the barrier is halved until it does not. `info.crossed` counts the halvings
    and `info.stood` the steps that stood. `check` warns of halvings, and refuses a result for which
    no step stood.

    Args:
        sigma: weight of the logarithm; falls to 0.
        shift: mu_2: how far f may be above its minimum; positive, falls to 0.
        ridge: mu_1 of the lower loss.
        upper_ridge: theta of the upper loss.
    """
    at, beyond = _function(sigma), _function(shift)
    return Multiplier(
        lambda count, gap: at(count) / (beyond(count) - gap),
        True,
        True,
        beyond,
        _function(ridge),
        _function(upper_ridge),
    )


def dynamic(eta: float) -> Multiplier:
    """So large that a step lowers the gap: `max(0, eta - <grad F, grad q> / |grad q|^2)` (BOME).

    q is the gap, with z constant. y makes one step for each of x; z begins at y.

    Args:
        eta: by how much a step lowers the gap, over `|grad q|^2`; above 0.

    Returns:
        What `value_gap` takes as `multiplier`.
    """
    return Multiplier(lambda count, gap: jnp.zeros(()), pull=eta)


def _function(value: Number) -> Callable[[Any], Any]:
    return value if callable(value) else lambda count: value
