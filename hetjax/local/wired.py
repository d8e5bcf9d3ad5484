"""A local rule that hands in fewer bytes, and later what the rounding has left (error feedback).

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes", 2019, arXiv 1901.09847.
"""

from typing import Any

import jax
import jax.numpy as jnp

from hetjax import trees, types, wires
from hetjax.local import rule as rule_lib


def wired(rule: rule_lib.LocalRule, wire: str) -> rule_lib.LocalRule:
    """A rule whose contributions are as they arrive; each worker keeps what is left.

    Args:
        rule: what a worker does; its contribution has the tree of the parameters.
        wire: of `wires.WIRES`.

    Raises:
        ValueError: the weights of the loss depend on the parameters, so that the contribution is
            not the whole of what is sent.
    """
    if rule.reads.weight_grads is not None:
        raise ValueError(
            f"reducer.wire: got {wire!r}, and the weights of loss_fn depend on the parameters; "
            "take jax.lax.stop_gradient(weights), or wire='float32'"
        )
    observed, keeps = rule.observed, rule.traits.keeps_worker  # else `own` begins anew

    def init(params: types.PyTree) -> tuple[types.PyTree, jax.Array]:
        return rule.init(params), jnp.zeros(trees.size(params), jnp.float32)

    def begin(shared: types.Shared, worker: Any) -> tuple[Any, types.PyTree]:
        own, sums = rule.begin(shared, worker[0] if keeps else rule.init(shared.params))
        return (own, worker[1]), sums

    def add(
        shared: types.Shared, worker: Any, sums: types.PyTree, *given: Any
    ) -> tuple[Any, types.PyTree]:
        own, sums = rule.add(shared, worker[0], sums, *given)
        return (own, worker[1]), sums

    def take(worker: Any, *given: Any) -> tuple[Any, types.PyTree]:
        assert observed is not None
        own, sums = observed.take(worker[0], *given)
        return (own, worker[1]), sums

    def finish(
        shared: types.Shared, worker: Any, sums: types.PyTree
    ) -> tuple[Any, types.PyTree, jax.Array]:
        own, contribution, weight = rule.finish(shared, worker[0], sums)
        wanted = trees.to_vector(contribution, jnp.float32) + worker[1]
        arrives = jnp.where(weight > 0, wires.rounded(wanted, wire), 0)
        told = trees.of_vector(arrives, contribution)
        told = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), told, contribution)
        return (own, wanted - arrives), told, weight

    return rule._replace(
        begin=begin,
        add=add,
        finish=finish,
        init=init,
        checked=lambda worker, sums: rule.checked(worker[0], sums),
        observed=None if observed is None else observed._replace(take=take),
        traits=rule.traits._replace(
            keeps_worker=True, resized=rule.traits.resized if keeps else "fresh"
        ),
    )
