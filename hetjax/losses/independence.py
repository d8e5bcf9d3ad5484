"""Do the examples of a microbatch see each other?

A quota divides a batch into microbatches. So a loss of one example that looks at others (negatives
of a contrastive loss, statistics of a batch) sees those of its microbatch alone. The loss is
computed as it is given, and with copies of one example in the place of all but two.
"""

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import debugging, messages, types
from hetjax.losses import loss as losses_lib

_SEE = "the examples of a microbatch see each other"
_SLOW_SECS = 1.0  # above which a user is told how long the check took
_RTOL, _ATOL = 1e-3, 1e-5
_AT_ONCE = {"xla_backend_optimization_level": 0}  # it runs a few times alone


class Seen(NamedTuple):
    """An example whose loss changed with the other examples of its microbatch."""

    loss: float
    beside_copies: float  # its loss when the others were replaced by copies of one example


def check(
    wanted: str,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    rng: jax.Array,
    *,
    leads: bool,
) -> None:
    """Looks, where an order does not itself need examples that are apart.

    Args:
        wanted: 'auto': the process that leads warns, but in debugging; 'example': all refuse;
            'microbatch': nobody looks.
        loss_fn: the user's.
        params: the parameters.
        examples: a microbatch of them.
        rng: its key, or one an example.
        leads: whether this process tells the user.

    Raises:
        ValueError: the examples see each other, with 'example'.
    """
    if wanted == "microbatch" or (wanted == "auto" and (debugging.is_on() or not leads)):
        return
    began = time.perf_counter()
    seen = find(loss_fn, params, examples, rng)
    secs = time.perf_counter() - began
    if secs > _SLOW_SECS and leads:
        messages.say(f"the check of the loss took {secs:.1f} s; loss_over='microbatch' has none")
    if seen is None:
        return
    size = jax.tree.leaves(examples)[0].shape[0]
    told = (
        f"{_SEE}, and none outside: {_numbers(seen)}. hetjax.batch_loss compares those of a round. "
        f"Not meant? Shapes [{size}, 1] and [{size}] together are [{size}, {size}]"
    )
    if wanted == "example":
        raise ValueError(f"loss_over='example': {told}")
    messages.say(f"{told}. loss_over='microbatch' allows it")


def refuse(
    loss_fn: losses_lib.LossFn, params: types.PyTree, examples: types.PyTree, rng: jax.Array
) -> None:
    """Refuses a loss whose examples have no gradients of their own, which balancing needs.

    Raises:
        ValueError: the examples of a microbatch see each other.
    """
    seen = find(loss_fn, params, examples, rng)
    if seen is not None:
        raise ValueError(
            f"ordering.method: {_SEE} (batch statistics?), so no order can balance their "
            f"gradients: {_numbers(seen)}"
        )


def _numbers(seen: Seen) -> str:
    return (
        f"loss_fn gives one example the loss {seen.loss:.6g} beside others and "
        f"{seen.beside_copies:.6g} beside copies of an example"
    )


def find(
    loss_fn: losses_lib.LossFn, params: types.PyTree, examples: types.PyTree, rng: jax.Array
) -> Seen | None:
    """An example that sees others, if there is one; None also where all losses are NaN.

    Args:
        loss_fn: the user's.
        params: the parameters.
        examples: a microbatch of them, leaves `[B, ...]`.
        rng: its key, or keys `[B]`.
    """
    size = jax.tree.leaves(examples)[0].shape[0]
    is_apart = getattr(loss_fn, "examples_are_apart", False)  # by construction: `per_example`
    if is_apart or size == 1:
        return None
    # The jit of the user's own function, where it can be: another run with it finds it compiled.
    own = loss_fn if isinstance(loss_fn, Hashable) else lambda *given: loss_fn(*given)
    options = _AT_ONCE if jax.default_backend() == "cpu" else None
    losses = losses_lib.weighted(jax.jit(own, compiler_options=options))
    params = moved(params)
    as_given = np.asarray(losses(params, examples, rng), np.float32)
    # Those kept are neither neighbours, nor opposite each other, nor half a batch apart.
    for kept in ([0, 2], [1, 3]) if size > 4 else ([0], [1]):
        copied = jax.tree.map(lambda leaf, kept=kept: _with_copies(leaf, kept), examples)
        one, other = as_given[kept], np.asarray(losses(params, copied, rng), np.float32)[kept]
        changed = ~np.isclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        if changed.any():
            change = np.nan_to_num(np.abs(one - other), nan=np.inf)
            worst = int(np.argmax(np.where(changed, change, -1)))
            return Seen(float(one[worst]), float(other[worst]))
    return None


def moved(params: types.PyTree) -> types.PyTree:
    """Each leaf moved at random, by about its own size, or 0.1 if it is smaller; on the host.

    As a program it would take longer to compile than the loss does.
    """
    rng = np.random.default_rng(0)

    def move(leaf: Any) -> np.ndarray:
        wide = np.asarray(leaf, np.float32)
        scale = max(float(np.sqrt(np.mean(np.square(wide)))), 0.1)
        return (wide + scale * rng.standard_normal(wide.shape)).astype(jnp.result_type(leaf))

    return jax.tree.map(move, params)


def _with_copies(leaf: Any, kept: list[int]) -> np.ndarray:
    """The examples at the places `kept`, and in the place of each other a copy of the first."""
    leaf = np.asarray(leaf)
    copied = np.repeat(leaf[kept[:1]], len(leaf), axis=0)
    copied[kept] = leaf[kept]
    return copied
