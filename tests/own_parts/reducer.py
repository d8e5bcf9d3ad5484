"""A reducer of one's own: the sum of all workers, each worker's part rounded to bfloat16 first.

hetjax.fit(…, reducer=rounded_sum())

A reducer is given sums alone. What divides them, the weight of all examples, is exact.
"""

import jax
import jax.numpy as jnp

import hetjax
from hetjax.topology import links


def rounded(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


@hetjax.parts.factory
def rounded_sum() -> hetjax.topology.Reducer:
    """Half the bytes of an all-reduce, for sums of 8 bits of precision."""

    def collective(sums, axis_name):
        return jax.tree.map(lambda x: jax.lax.psum(rounded(x), axis_name), sums)

    def array(sums):
        def total(x):
            return jnp.broadcast_to(rounded(x).sum(axis=0, keepdims=True), x.shape)

        return jax.tree.map(total, sums)

    return hetjax.topology.Reducer(
        make=lambda facts: hetjax.topology.Reduction(collective, array),
        keeps_replicas_equal=True,
        network=lambda facts, size, link: links.of_sum(facts.num_workers, size / 2, link),
    )
