"""A reducer without all that it may leave out: `hetjax.fit(…, reducer=plain_sum())`."""

import jax

import hetjax


@hetjax.parts.factory
def plain_sum() -> hetjax.topology.Reducer:
    """The sum of all workers."""
    return hetjax.topology.Reducer(
        lambda facts: hetjax.topology.Reduction(jax.lax.psum), keeps_replicas_equal=True
    )
