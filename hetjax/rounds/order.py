"""The order that a run asks for, tried on its loss: does it work, and by which of its forms?"""

import jax
import numpy as np

from hetjax import debugging, kinds, messages, ordering, types
from hetjax.config import experiment as config_lib
from hetjax.rounds import batch_loss, contract, independence, programs, rules
from hetjax.rounds import losses as losses_lib


def make(
    config: config_lib.ExperimentConfig,
    method: ordering.Ordering,
    rule: rules.LocalRule,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    keys: jax.Array,
    *,
    leads: bool,
    changes_state: bool = False,
) -> tuple[ordering.Observer | None, str]:
    """The order's part on the devices, and why it takes its dearer form with this loss.

    Args:
        config: of the run.
        method: the ordering.
        rule: what the workers do.
        loss_fn: the user's.
        params: the parameters.
        examples: a microbatch of them.
        keys: one key, or one an example: whether the loss is given one for each.
        leads: whether this process tells the user what is noticed.
        changes_state: a call of the loss changes the model's state.

    Returns:
        the part, None where the order needs none; and the reason, '' where it takes no dearer form.

    Raises:
        ValueError: the method cannot work with this loss.
    """
    observer = method.observer(programs.sizes(config))
    if changes_state and observer is not None:
        raise ValueError(
            f"ordering.method: {kinds.name_of('ordering', method)!r} needs the gradient of each "
            "example, and the model's state is made of all examples of a microbatch (batch "
            "statistics?), so that one example alone has none. Take "
            "ordering.method='random_reshuffling', or the model with its state fixed "
            "(use_running_average=True)"
        )
    if changes_state or isinstance(loss_fn, batch_loss.BatchLoss):
        return None, ""  # that they see each other is meant
    if observer is None:
        independence.check(config.loss_over, loss_fn, params, examples, keys, leads=leads)
        return None, ""
    rules.with_observer(rule, observer)  # or the rule computes something else
    independence.refuse(loss_fn, params, examples, keys)
    if debugging.is_on():  # the first round says what is wrong
        return observer, ""
    try:
        refusal = _refusal(observer, rule, loss_fn, params, examples, keys)
    except contract.BrokenError as error:
        raise ValueError(
            f"{error}. It was given what observe of the order "
            f"{kinds.name_of('ordering', method)!r} returned: ((loss_sum f[], weights.sum()), "
            "grad_parts like the parameters, …)"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        name = kinds.name_of("ordering", method)
        raise ValueError(
            f"ordering.method: {name!r} cannot work with this loss. 'grab' and those that end in "
            "'_exact' call loss_fn with one example; the others take its forward derivative, "
            "which a custom_vjp has not. Where the loss has metrics, one of your own gives back "
            f"weights.sum(): {str(error).splitlines()[0]}"
        ) from error
    if refusal and leads:
        messages.say(_dearer(config.ordering.method, refusal))
    return observer, refusal


def _refusal(
    observer: ordering.Observer,
    rule: rules.LocalRule,
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

    steps, shared = rules.with_observer(rule, observer), types.Shared(params)
    carried = steps.begin(shared, rule.init(params), observer.init(params))
    jax.jit(steps.add).lower(shared, carried, microbatch, jax.random.key(0))
    jax.eval_shape(refusal, params, microbatch, jax.random.key(0))
    return reasons[0]


def _dearer(name: str, refusal: str) -> str:
    """What to tell a person of the reason that `make` gave."""
    return (
        f"ordering.method={name!r} takes a backward pass more for each microbatch than "
        "with a loss whose program shows that each example is computed by itself. This one's does "
        f"not: {refusal}. The gradients are right all the same. For the faster form, write it "
        "without positions in the batch, such as jnp.take_along_axis(x, y[:, None], 1)[:, 0] for "
        "x[jnp.arange(B), y], or as the jax.vmap of one example's loss."
    )
