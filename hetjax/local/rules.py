"""What does a worker do with its microbatches, and what does it hand to the synchronisation?

A local rule answers this (`rule.LocalRule`), a record of pure functions. A rule knows no quota, no
order and no other worker, and holds no collective. `with_observer` puts around it what every rule
needs: the count of what was done, the guard against numbers that are not finite, and the evidence
for orders. All three local forms run what `with_observer` returns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import trees, types
from hetjax.local import contract
from hetjax.local.rule import LocalRule, Observed, Reads, Traits, check, for_a_loss  # noqa: F401
from hetjax.losses import named as named_lib
from hetjax.ordering import ordering


class LocalSteps(NamedTuple):
    """A local rule with all that is around it, for one worker; leaves without worker axis."""

    begin: Callable[[types.Shared, types.PyTree, types.PyTree], types.Carried]
    """`(shared, worker, memory) -> carried`, the last two of a `TrainState`."""

    add: Callable[..., tuple[types.Carried, Any]]
    """`(shared, carried, microbatch, rng, active=True) -> (carried, example_signs)`;
    `example_signs` is i8[B], or () without an observer. Where `active` bool[] is false nothing
    changes. The leaves of `carried` may all have a leading axis of 1."""

    finish: Callable[[types.Shared, types.Carried], types.Contribution]
    """`(shared, carried) -> contribution`. The leaves of `carried` may have a leading axis of 1."""


def with_observer(
    rule: LocalRule, observer: ordering.Observer | None = None, *, updates: bool = False
) -> LocalSteps:
    """A local rule with its tally, its guard, and the evidence for an order.

    A microbatch after which anything in `worker` or `sums` is not finite adds nothing to these
    nor to the evidence, and the first such one's position in the round is kept.

    Args:
        rule: what a worker does.
        observer: of the order; None where the order needs no evidence.
        updates: the parameters are updated by what the rule contributes.

    Raises:
        ValueError: the observer needs gradients of the objective, and the rule computes
            something else, or its weights depend on the parameters; or (when traced) what the rule
            returns breaks its contract.
    """
    check(rule)
    if observer is not None and rule.reads.weight_grads is not None:
        raise ValueError(
            "ordering: the weights of loss_fn depend on the parameters; take ordering.method="
            "'random_reshuffling', or jax.lax.stop_gradient(weights)"
        )
    if observer is not None and rule.observed is None:
        raise ValueError(
            "rule: the order balances gradients, and the rule has none (observed); take "
            "ordering.method='random_reshuffling'"
        )

    return LocalSteps(
        named_lib.scoped(functools.partial(_begin, rule, observer)),
        named_lib.scoped(functools.partial(_add, rule, observer)),
        named_lib.scoped(functools.partial(_finish, rule, updates)),
    )


def _begin(
    rule: LocalRule,
    observer: ordering.Observer | None,
    shared: types.Shared,
    worker: types.PyTree,
    memory: types.PyTree,
) -> types.Carried:
    worker = worker if rule.traits.keeps_worker else rule.init(shared.params)
    kept = (worker,) if rule.traits.keeps_worker else ()
    begun = contract.begun(rule.begin, rule.begin(shared, worker), kept)
    worker, sums = jax.tree.map(_strong, begun)
    evidence = () if observer is None else observer.begin_round(memory)
    zero: Any = np.zeros((), np.int32)
    return types.Carried(worker, sums, evidence, types.Tally(zero, zero, zero - 1))


def _strong(leaf: Any) -> jax.Array:
    """As an array whose type is its own, not one that gives way to others."""
    leaf = leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
    return leaf.astype(jnp.result_type(leaf), copy=False)


def _add(
    rule: LocalRule,
    observer: ordering.Observer | None,
    shared: types.Shared,
    carried: types.Carried,
    microbatch: types.Microbatch,
    rng: jax.Array,
    active: jax.Array | bool = True,
) -> tuple[types.Carried, Any]:
    has_row_axis = carried.tally.example_count.ndim == 1
    called: Any = ("add", rule.add, (shared,), (microbatch, rng))
    change: types.PyTree = ()
    example_signs: Any = ()
    if observer is not None:
        assert rule.observed is not None
        so_far = trees.first_row(carried) if has_row_axis else carried
        (loss_sum, weight_sum), grad_parts, change, example_signs = observer.observe(
            rule.observed.losses(microbatch, rng),
            shared,
            so_far.evidence,
            microbatch,
            so_far.tally.microbatches_done,
            rng,
        )
        called = ("take", rule.observed.take, (), (loss_sum, weight_sum, grad_parts))
    name, function, of_rule, given = called

    def guarded(before: types.Carried) -> tuple[types.Carried, jax.Array]:
        both = before.worker, before.sums
        after = contract.added(name, function, function(*of_rule, *both, *given), both)
        # The barrier has XLA decide once, and not anew for each number that is added.
        finite = jax.lax.optimization_barrier(trees.all_finite(rule.checked(*after)))
        counts = finite & active
        worker, sums = trees.select(counts, after, both)
        evidence = jax.tree.map(
            lambda total, term: jnp.where(counts, total + term.astype(total.dtype), total),
            before.evidence,
            change,
        )
        tally = _counted(before.tally, microbatch, finite=finite, active=active)
        return types.Carried(worker, sums, evidence, tally), finite

    if has_row_axis and rule.traits.own_params:
        after = guarded(trees.first_row(carried))
        carried, finite = jax.tree.map(lambda leaf: leaf[None], after)
    else:
        # Over an axis of 1: a sum that were reshaped would not be updated in place (21 MB of
        # gradients: two passes over memory more).
        carried, finite = (jax.vmap(guarded) if has_row_axis else guarded)(carried)
    if observer is not None:  # a microbatch that is left out has the signs of no evidence
        first = jnp.arange(example_signs.shape[0]) % 2 == 0
        has_signs = finite | (example_signs == ordering.COUPLED)
        example_signs = jnp.where(has_signs, example_signs, jnp.where(first, 1, -1))
        example_signs = example_signs.astype(jnp.int8)
    return carried, example_signs


def _finish(
    rule: LocalRule, updates: bool, shared: types.Shared, carried: types.Carried
) -> types.Contribution:
    params = (shared.params,) if updates else ()

    def one(carried: types.Carried) -> types.Contribution:
        reads, added = rule.reads, carried.sums
        returned = rule.finish(shared, carried.worker, added)
        kept = (carried.worker,) if rule.traits.keeps_worker else ()
        worker, sums, weight = contract.finished(rule.finish, returned, kept, params)

        def number(name: str, otherwise: Any) -> Any:
            read = getattr(reads, name)
            return otherwise if read is None else contract.number(name, read, read(added))

        counts = types.Counts(weight, number("scale", jnp.ones_like(weight)))
        metric_sums, own, weight_grads, state_change = (), (), (), ()
        if reads.metric_sums is not None:
            measured = reads.metric_sums(added)
            metric_sums = contract.of_metrics(reads.metric_sums, measured, reads.metrics)
        if reads.own_sums is not None:
            own = contract.sums("own_sums", reads.own_sums, reads.own_sums(added))
        if reads.weight_grads is not None:
            grads = reads.weight_grads(added)
            weight_grads = contract.of_weights(reads.weight_grads, grads, sums)
        if reads.state_change is not None:
            state_change = reads.state_change(added)
        return types.Contribution(
            sums=sums,
            weight=number("loss_weight", weight),
            loss_sum=number("loss_sum", jnp.zeros_like(weight)),
            worker=worker if rule.traits.keeps_worker else (),
            evidence=carried.evidence,
            tally=carried.tally,
            metric_sums=metric_sums,
            own=own,
            weight_grads=weight_grads,
            state_change=state_change,
            counts=counts if rule.traits.weighs_itself else (),
        )

    has_row_axis = carried.tally.example_count.ndim == 1
    return (jax.vmap(one) if has_row_axis else one)(carried)


def _counted(
    tally: types.Tally, microbatch: types.Microbatch, *, finite: jax.Array, active: jax.Array | bool
) -> types.Tally:
    count, done, nonfinite = tally
    examples = jnp.sum(microbatch.example_mask > 0).astype(count.dtype)
    return types.Tally(
        example_count=jnp.where(finite & active, count + examples, count),
        microbatches_done=done + jnp.asarray(active, done.dtype),
        nonfinite_microbatch=jnp.where(active & ~finite & (nonfinite < 0), done, nonfinite),
    )


def contribution_shapes(rule: LocalRule, params: types.PyTree, *others: types.PyTree) -> Any:
    """The shapes and types of what a worker contributes; computes nothing.

    None where that depends on what a round is given, or the rule cannot begin without it. `others`
    are the model's state, and what there is by name.
    """
    steps = with_observer(rule)

    def contribution(params: types.PyTree, *others: Any) -> types.PyTree:
        shared = types.Shared(params, _NotGiven(), *others)
        return steps.finish(shared, steps.begin(shared, rule.init(params), ())).sums

    try:
        return jax.eval_shape(contribution, params, *others)
    except Exception:  # of whatever the rule does with it; any other error its first round raises
        return None


class _NotGiven:
    """In place of what a round is given, where that is not known yet: to look at it raises."""

    __bool__ = __iter__ = __len__ = __eq__ = None  # type: ignore[assignment]


def _look(*looked_at: Any) -> Any:
    raise TypeError("what the round is given is not known yet")


jax.tree_util.register_pytree_node(_NotGiven, _look, _look)  # as by jax.tree.map
