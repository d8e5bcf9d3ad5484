"""The order that a run asks for, tried on its loss: does it work, and by which of its forms?"""

import jax
import numpy as np

from hetjax import ordering, types
from hetjax.training import gradients, rules
from hetjax.training import losses as losses_lib


def make(
    name: str,
    options: ordering.Options,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    keys: jax.Array,
) -> tuple[ordering.Ordering, str]:
    """The method of this name, and why it takes its dearer form with this loss ('': it does not).

    Args:
        name: of `ordering.ORDERINGS`.
        options: what it is made for.
        loss_fn: the user's.
        params: the parameters.
        examples: a microbatch of them.
        keys: one key, or one an example: whether the loss is given one for each.

    Raises:
        ValueError: the method cannot work with this loss.
    """
    method = ordering.ORDERINGS[name](options)
    if method.observer is None:
        return method, ""
    losses_lib.check_examples_apart(loss_fn, params, examples, keys)
    try:
        return method, _refusal(method.observer, loss_fn, params, examples, keys)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"ordering.method: {name!r} cannot work with this loss. 'grab' and those that end in "
            "'_exact' call loss_fn with one example; the others take its forward derivative, "
            f"which a custom_vjp has not: {str(error).splitlines()[0]}"
        ) from error


def _refusal(
    observer: ordering.Observer,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    keys: jax.Array,
) -> str:
    """Lowers the local phase, without compiling: a custom_vjp is noticed then at the earliest."""
    size = jax.tree.leaves(examples)[0].shape[0]
    microbatch = types.Microbatch(
        np.arange(size, dtype=np.int32), np.ones(size, np.float32), examples
    )
    per_example_rng, reasons = keys.ndim > 0, []

    def refusal(params: types.PyTree, microbatch: types.Microbatch, rng: jax.Array) -> None:
        losses = losses_lib.masked(loss_fn, microbatch, rng, per_example_rng=per_example_rng)
        reasons.append(observer.refusal(losses, params, size))

    rule = gradients.gradient_sums(loss_fn, per_example_rng=per_example_rng)
    steps, shared = rules.with_observer(rule, observer), types.Shared(params)
    jax.jit(steps.add).lower(
        shared, steps.begin(shared, (), observer.init(params)), microbatch, jax.random.key(0)
    )
    jax.eval_shape(refusal, params, microbatch, jax.random.key(0))
    return reasons[0]


def dearer(name: str, refusal: str) -> str:
    """What to tell a person of the reason that `make` gave."""
    return (
        f"hetjax: ordering.method={name!r} takes a backward pass more for each microbatch than "
        "with a loss whose program shows that each example is computed by itself. This one's does "
        f"not: {refusal}. The gradients are right all the same. For the faster form, write it "
        "without positions in the batch, such as jnp.take_along_axis(x, y[:, None], 1)[:, 0] for "
        "x[jnp.arange(B), y], or as the jax.vmap of one example's loss."
    )
