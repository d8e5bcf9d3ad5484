"""The order that a run asks for, tried on its loss: does it work?"""

import jax

from hetjax import executor, ordering, types
from hetjax.config import kinds
from hetjax.inputs import rule_identity
from hetjax.local import contract, rules
from hetjax.losses import batch_loss
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib


def make(
    method: ordering.Ordering,
    sizes: ordering.Sizes,
    rule: rules.LocalRule,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    *,
    changes_state: bool = False,
) -> ordering.Observer | None:
    """The order's part on the devices; None where the order needs none.

    Args:
        method: the ordering.
        sizes: for which its part is made.
        rule: what the workers do.
        loss_fn: the user's.
        params: the parameters.
        examples: a microbatch of them.
        changes_state: a call of the loss changes the model's state.

    Raises:
        ValueError: the method cannot work with this loss.
    """
    observer, name = method.observer(sizes), kinds.name_of("ordering", method)
    if changes_state and observer is not None:
        raise ValueError(
            f"ordering.method: {name!r} needs each example's gradient; the model's state (batch "
            "statistics?) is of all: take 'random_reshuffling'"
        )
    if observer is None or isinstance(loss_fn, batch_loss.BatchLoss):
        return None
    steps = rules.with_observer(rule, observer)  # or the rule computes something else
    if executor.is_eager():  # the first round says what is wrong
        return observer
    try:
        shared, key = types.Shared(params, named=named_lib.current()), jax.random.key(0)
        carried = steps.begin(shared, rule.init(params), observer.init(params))
        # Not compiled: a custom_vjp is noticed when it is lowered, at the earliest.
        jax.jit(steps.add).lower(shared, carried, rule_identity.microbatch_of(examples), key)
    except contract.BrokenError as error:
        raise ValueError(
            f"{error}. It was given what observe of the order {name!r} returned"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"ordering.method: {name!r} cannot work with this loss (a custom_vjp? metrics without "
            f"weights.sum()?): {str(error).splitlines()[0]}"
        ) from error
    return observer
