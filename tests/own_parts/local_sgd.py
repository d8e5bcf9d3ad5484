"""A local rule of one's own: local SGD, a step a microbatch, synchronised by the workers' mean.

An inner optimiser's state, its momentum for example, stays with the worker from round to round.
"""

import jax
import jax.numpy as jnp
import optax

import hetjax
from hetjax.local import rules
from hetjax.losses import loss as losses_lib


def local_sgd(loss_fn, inner):
    """Takes the workers' mean displacement for a gradient: give the run `optax.sgd(1.0)`."""

    def begin(shared, opt_state):
        return opt_state, (shared.params, jnp.zeros(()), jnp.zeros(()))

    def add(shared, opt_state, sums, microbatch, rng):
        params, loss_sum, weight_sum = sums

        def mean_loss(params):
            values, weights = losses_lib.masked(loss_fn, microbatch, rng)(params)
            loss, weight = values.sum(), weights.sum()
            return loss / jnp.where(weight > 0, weight, 1), (loss, weight)

        grads, (loss, weight) = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = inner.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return opt_state, (params, loss_sum + loss, weight_sum + weight)

    def finish(shared, opt_state, sums):
        end, _, weight = sums
        moved = jax.tree.map(lambda a, b: weight * (a - b), shared.params, end)
        return opt_state, moved, weight

    reads, traits = (
        rules.Reads(loss_sum=lambda sums: sums[1]),
        rules.Traits(keeps_worker=True, own_params=True),
    )
    return hetjax.LocalRule(begin, add, finish, inner.init, reads=reads, traits=traits)
