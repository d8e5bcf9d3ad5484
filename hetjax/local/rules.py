"""What does a worker do with its microbatches, and what does it hand to the synchronisation?

A local rule answers this, a record of pure functions. A rule knows no quota, no order and no other
worker, and holds no collective. `with_observer` puts around it what every rule needs: the count of
what was done, the guard against numbers that are not finite, and the evidence for orders. All three
local forms run what `with_observer` returns.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import parts, trees, types
from hetjax.local import contract
from hetjax.losses import named as named_lib
from hetjax.ordering import ordering


class LocalRule(NamedTuple):
    """What a worker does with its microbatches. All functions are pure, and leaves have no worker
    axis. `shared` is a `types.Shared`, `worker` what the rule keeps for itself.

    A loss that asks for `frozen` or `values` is given those of `shared.named` while these run.

    Example:
        Gradients of one array of parameters, without weights, padding and keys (`gradients.py`
        has the whole rule)::

            def add(shared, worker, sums, microbatch, rng):
                grads = jax.grad(loss)(shared.params, microbatch.examples)
                return worker, (sums[0] + grads, sums[1] + 1)

            LocalRule(
                begin=lambda shared, worker: (worker, (jnp.zeros_like(shared.params), 0.0)),
                add=add,
                finish=lambda shared, worker, sums: (worker, *sums),
            )
    """

    begin: Callable[[types.Shared, types.PyTree], tuple[types.PyTree, types.PyTree]]
    """`(shared, worker) -> (worker, sums)`, before the first microbatch of a round. From there on
    neither changes its tree, shapes or types."""

    add: Callable[..., tuple[types.PyTree, types.PyTree]]
    """`(shared, worker, sums, microbatch, rng) -> (worker, sums)`. `rng` is the key of the run and
    the pass, the same for all microbatches: fold example ids into it, as `losses.masked` does.
    Where anything in the new `worker` or `sums` is not finite, the old ones stay (`checked`)."""

    finish: Callable[..., tuple[types.PyTree, types.PyTree, jax.Array]]
    """`(shared, worker, sums) -> (worker, contribution, weight f[])`. The synchronisation sums
    contributions and weights over the workers and divides once: so a contribution is a sum over
    the worker's examples, weighted, and `weight` the sum of the weights, 0 where nothing was
    done; both finite floating point, `weight` in float32 or wider. Where the run updates, the
    contribution has the tree and the shapes of the parameters; else it may be any tree."""

    init: Callable[[types.PyTree], types.PyTree] = lambda params: ()
    """`params -> worker`, before the first round; before each round where nothing is kept."""

    keeps_worker: bool = False
    """`worker` goes from round to round. It is in `TrainState.worker` and in checkpoints."""

    losses: Callable[[types.Microbatch, jax.Array], ordering.Losses] | None = None
    """`(microbatch, rng) -> losses` for an order's observer: `losses.masked` of the run's
    `loss_fn`; others are refused. None where the contribution is not the gradient of the objective:
    then such orders are refused."""

    take: Callable[..., tuple[types.PyTree, types.PyTree]] | None = None
    """`(worker, sums, loss_sum, weight_sum, grad_parts) -> (worker, sums)`, in place of `add`
    where an observer has computed the gradient, the sum of the trees `grad_parts`. `weight_sum` is
    the `.sum()` of the weights that `losses` gives."""

    checked: Callable[[types.PyTree, types.PyTree], types.PyTree] = lambda *both: both
    """`(worker, sums) -> tree`: what must be finite after a microbatch. By default all; a rule that
    can judge a microbatch more cheaply puts its judgement into one of its sums and gives that."""

    loss_sum: Callable[[types.PyTree], jax.Array] | None = None
    """`sums -> f[]`, for the report: over the same weight as the contribution. None: the run has no
    training loss; then an optimiser that goes by it is refused."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics that the rule adds up, those that the loss returns."""

    metric_sums: Callable[[types.PyTree], Mapping[str, tuple[jax.Array, jax.Array]]] | None = None
    """`sums -> {name: (weighted sum f[], weight f[])}` of `metrics`, for the report."""

    own_sums: Callable[[types.PyTree], types.PyTree] | None = None
    """`sums -> tree`: sums that stay with the worker, such as numbers that belong to one example
    each. They are divided as the contribution is, and not added up over the workers: `report.own`
    of a round without update. They cost no communication."""

    weight_grads: Callable[[types.PyTree], types.PyTree] | None = None
    """`sums -> tree` like the contribution: the derivative of the sum of weights, for a rule whose
    weights depend on what it differentiates. The mean loss of all workers times it is taken off
    the contribution before these are summed: so the contributions over the weight are the
    derivative of `sum w l / sum w`, as the quotient rule has it. It needs a `loss_sum`."""

    state_change: Callable[[types.PyTree], types.PyTree] | None = None
    """`sums -> types.StateChange` of the model's state, `shared.model_state`: what the microbatches
    changed, each beginning at the round's state; the means' part times its examples. () where the
    run's model keeps none. None: the rule changes no state."""

    loss_divisor: int = 1
    """What `losses` are divided by; `take` multiplies what it is given by it."""

    of_examples: "Callable[..., LocalRule] | None" = None
    """`(loss_fn, *, per_example_rng, metrics) -> LocalRule`: the same for the loss of the run, of
    which it takes each example by itself. A loss whose examples see each other is refused."""

    made_by: Any = None
    """How it can be written down; None: it cannot."""


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


_ARGUMENTS = {"begin": 2, "add": 5, "finish": 3, "init": 1, "checked": 2}


def check(rule: Any) -> None:
    """Refuses what is no local rule.

    Raises:
        ValueError: it is no `LocalRule`, or one of its functions is missing.
    """
    if not isinstance(rule, LocalRule):
        wrong = f"got a {type(rule).__name__}"
        if callable(rule) and not isinstance(rule, type):
            wrong += "; call it, if it makes a rule"
    else:
        of_function = parts.wrong_functions(rule, _ARGUMENTS)
        wrong = f"its {of_function}" if of_function else ""
        if (rule.losses is None) != (rule.take is None):
            wrong = "it has only one of losses and take; an order's observer needs both"
        if bool(rule.metrics) != (rule.metric_sums is not None):
            wrong = "it has only one of metrics and metric_sums; a rule with metrics needs both"
        if rule.weight_grads is not None and rule.loss_sum is None:
            wrong = "it has weight_grads and no loss_sum, whose mean these are multiplied by"
    if wrong:
        raise ValueError(
            f"rule: {wrong}; it must be a hetjax.LocalRule(begin, add, finish), such as "
            "hetjax.local.gradients.gradient_sums(loss_fn)"
        )


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
    if observer is not None and rule.weight_grads is not None:
        raise ValueError(
            "ordering: the weights of loss_fn depend on the parameters; take ordering.method="
            "'random_reshuffling', or jax.lax.stop_gradient(weights)"
        )
    if observer is not None and (rule.losses is None or rule.take is None):
        raise ValueError(
            "rule: the order balances gradients, and the rule has none (losses, take); take "
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
    worker = worker if rule.keeps_worker else rule.init(shared.params)
    kept = (worker,) if rule.keeps_worker else ()
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
    change: types.PyTree = ()
    example_signs: Any = ()
    if observer is None:

        def step(worker: types.PyTree, sums: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
            returned = rule.add(shared, worker, sums, microbatch, rng)
            return contract.added("add", rule.add, returned, (worker, sums))
    else:
        assert rule.losses is not None
        so_far = trees.first_row(carried) if has_row_axis else carried
        (loss_sum, weight_sum), grad_parts, change, example_signs = observer.observe(
            rule.losses(microbatch, rng),
            shared,
            so_far.evidence,
            microbatch,
            so_far.tally.microbatches_done,
            rng,
        )

        def step(worker: types.PyTree, sums: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
            assert rule.take is not None
            returned = rule.take(worker, sums, loss_sum, weight_sum, grad_parts)
            return contract.added("take", rule.take, returned, (worker, sums))

    def guarded(before: types.Carried) -> tuple[types.Carried, jax.Array]:
        after = step(before.worker, before.sums)
        # The barrier has XLA decide once, and not anew for each number that is added.
        finite = jax.lax.optimization_barrier(trees.all_finite(rule.checked(*after)))
        counts = finite & active
        worker, sums = trees.select(counts, after, (before.worker, before.sums))
        evidence = jax.tree.map(
            lambda total, term: jnp.where(counts, total + term.astype(total.dtype), total),
            before.evidence,
            change,
        )
        tally = _counted(before.tally, microbatch, finite=finite, active=active)
        return types.Carried(worker, sums, evidence, tally), finite

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
        returned = rule.finish(shared, carried.worker, carried.sums)
        kept = (carried.worker,) if rule.keeps_worker else ()
        worker, sums, weight = contract.finished(rule.finish, returned, kept, params)
        loss_sum, metric_sums, own, weight_grads = jnp.zeros_like(weight), (), (), ()
        state_change: types.PyTree = ()
        if rule.loss_sum is not None:
            loss_sum = contract.number("loss_sum", rule.loss_sum, rule.loss_sum(carried.sums))
        if rule.metric_sums is not None:
            measured = rule.metric_sums(carried.sums)
            metric_sums = contract.of_metrics(rule.metric_sums, measured, rule.metrics)
        if rule.own_sums is not None:
            own = contract.sums("own_sums", rule.own_sums, rule.own_sums(carried.sums))
        if rule.weight_grads is not None:
            grads = rule.weight_grads(carried.sums)
            weight_grads = contract.of_weights(rule.weight_grads, grads, sums)
        if rule.state_change is not None:
            state_change = rule.state_change(carried.sums)
        return types.Contribution(
            sums=sums,
            weight=weight,
            loss_sum=loss_sum,
            worker=worker if rule.keeps_worker else (),
            evidence=carried.evidence,
            tally=carried.tally,
            metric_sums=metric_sums,
            own=own,
            weight_grads=weight_grads,
            state_change=state_change,
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
