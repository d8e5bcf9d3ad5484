"""A local rule of one's own: the product of the loss's Hessian and a vector that a round is given.

A round without update returns it, as the mean over the round's examples.
"""

import jax
import jax.numpy as jnp

import hetjax
from hetjax.losses import loss as losses_lib


def hessian_product(loss_fn):
    """`sum_i w_i H_i v` over a worker's examples, with `v` in `shared.given`."""

    def begin(shared, worker):
        return worker, (jax.tree.map(jnp.zeros_like, shared.given), jnp.zeros(()))

    def add(shared, worker, sums, microbatch, rng):
        weighted = losses_lib.masked(loss_fn, microbatch, rng)

        def gradient(params):
            return jax.grad(lambda p: weighted(p)[0].sum())(params)

        product = jax.jvp(gradient, (shared.params,), (shared.given,))[1]
        weight = weighted(shared.params)[1].sum()
        return worker, (jax.tree.map(jnp.add, sums[0], product), sums[1] + weight)

    def finish(shared, worker, sums):
        return worker, *sums

    return hetjax.LocalRule(begin, add, finish)
