"""An ordering of one's own, with signs: a pair's harder example goes to the front of the next pass.

    hetjax.fit(…, ordering=harder_first())

It needs the losses alone, so its part on the devices keeps nothing from round to round.
"""

import jax
import jax.numpy as jnp

import hetjax
from hetjax.ordering import matrix_free, orders, pairs


@hetjax.parts.factory
def harder_first() -> hetjax.ordering.Ordering:
    """Of each pair, the example of the larger loss is placed first."""

    def local(losses, worker_state, nothing, microbatch, position, rng):
        def objective(params):
            values, weights = losses(params)
            return values.sum(), (values, weights.sum())

        grads, (values, weight) = jax.grad(objective, has_aux=True)(worker_state.params)
        first, second = pairs.split(values)
        sign = jnp.where(first >= second, 1, -1).astype(jnp.int8)
        signs = pairs.example_signs(sign, microbatch.example_mask)
        return (values.sum(), weight), (grads,), jnp.zeros_like(nothing), signs

    def make_observer(sizes):
        return matrix_free.independent(lambda params: jnp.zeros(()), local, new_pass=jnp.zeros_like)

    return hetjax.ordering.Ordering(*orders.balanced(), make_observer=make_observer)
