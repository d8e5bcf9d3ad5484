"""Is a local rule that was given one of this run, and by what is it known again?"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax import digests, executor, types
from hetjax.inputs import refusals as inputs
from hetjax.local import contract, rules
from hetjax.losses import loss as losses_lib
from hetjax.losses.named import scoped


def check(
    rule: rules.LocalRule | None,
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    optimizer: optax.GradientTransformation | None,
    *,
    per_example_rng: bool,
) -> None:
    """Refuses a rule whose loss is not the run's. Nothing is computed, and no gradient traced.

    Where the executor is eager, and nothing is traced at all, losses are not compared.

    Args:
        rule: that was given; None: the run's own, of `loss_fn`.
        loss_fn, params, optimizer, per_example_rng: of the run.
        examples: a microbatch of them.

    Raises:
        ValueError: its losses are others, so that the run would train them and be evaluated,
            recorded and gone on with as `loss_fn`; or it has no loss, by which the optimiser goes.
    """
    if rule is None:
        return
    if optimizer is not None and rule.reads.loss_sum is None:
        inputs.check_without_loss(optimizer, params)
    if rule.observed is None or executor.is_eager():
        return
    of_run = functools.partial(
        losses_lib.masked, loss_fn, per_example_rng=per_example_rng, metrics=rule.reads.metrics
    )
    given = _shapes_of(params), microbatch_of(examples), jax.random.key(0)

    def program(losses: Callable) -> str:
        def of_microbatch(params: types.PyTree, microbatch: Any, rng: jax.Array) -> Any:
            return losses(microbatch, rng)(params)

        return digests.of_programs((of_microbatch, given))

    if program(rule.observed.losses) != program(of_run):
        keys = f"per_example_rng={per_example_rng}"
        raise ValueError(
            f"rule: its losses are not those of loss_fn with {keys}; give both one loss, such as "
            f"rule=hetjax.local.gradients.gradient_sums(loss_fn, {keys})"
        )


def digest(
    rule: rules.LocalRule,
    params: types.PyTree,
    examples: types.PyTree,
    model_state: types.PyTree = (),
    named: types.Named = types.UNNAMED,
) -> str:
    """What a rule computes, with all constants in it, where its rounds are given no values.

    Raises:
        ValueError: what it returns breaks its contract.
    """

    def begin(shared: types.Shared, worker: types.PyTree) -> Any:
        return contract.begun(rule.begin, rule.begin(shared, worker), ())

    def add(shared: types.Shared, worker: types.PyTree, sums: types.PyTree, *others: Any) -> Any:
        returned = rule.add(shared, worker, sums, *others)
        return contract.added("add", rule.add, returned, (worker, sums))

    def finish(shared: types.Shared, *sums: types.PyTree) -> Any:
        return contract.finished(rule.finish, rule.finish(shared, *sums), (), ())

    shared = types.Shared(*map(_shapes_of, (params, (), model_state, named)))
    worker = jax.eval_shape(rule.init, shared.params)
    begun = _shapes_of(jax.eval_shape(begin, shared, worker))
    return digests.of_programs(
        (rule.init, (shared.params,)),
        (scoped(begin), (shared, worker)),
        (scoped(add), (shared, *begun, microbatch_of(examples), jax.random.key(0))),
        (scoped(finish), (shared, *begun)),
    )


def _shapes_of(tree: types.PyTree) -> types.PyTree:
    """With types of their own, that give way to no others."""
    found = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), tree)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)


def microbatch_of(examples: types.PyTree) -> types.PyTree:
    """Only its shapes."""
    size = jax.tree.leaves(examples)[0].shape[0]
    ids, mask = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.int32, jnp.float32))
    whole: Any = ids, mask, _shapes_of(examples)
    return types.Microbatch(*whole)
