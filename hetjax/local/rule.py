"""What a local rule is: a record of pure functions, and what it says of itself."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from hetjax import parts, types
from hetjax.ordering import ordering


class Traits(NamedTuple):
    """What a rule says of itself."""

    keeps_worker: bool = False
    """`worker` goes from round to round. It is in `TrainState.worker` and in checkpoints."""

    weighs_itself: bool = False
    """Its weight is how much the worker counts beside the others: neither shards nor gossip weigh
    its contribution again. `Reads.loss_weight` is that of the loss."""

    by_share: bool = False
    """Of a rule that weighs itself: as much as its weight times the share of its private shard."""

    by_example: bool = False
    """It takes each example by itself: a loss whose examples see each other is refused."""

    own_params: bool = False
    """Its sums hold parameters of its own, at which it differentiates. So `add` is not called over
    an axis of 1 worker (`jax.vmap`), nor is the loss."""

    resized: str = "mean"
    """What workers begin with where there are more or fewer than before: 'mean', of what all have
    kept, or 'fresh', what `init` gives. Where workers come and go, whoever comes is handed what the
    leader keeps in place of the mean, and so it is in checkpoints."""


class Reads(NamedTuple):
    """What a worker's sums tell at the end of its round, beside the contribution."""

    loss_sum: Callable[[types.PyTree], jax.Array] | None = None
    """`sums -> f[]`, for the report. None: the run has no training loss; then an optimiser that
    goes by it is refused."""

    loss_weight: Callable[[types.PyTree], jax.Array] | None = None
    """`sums -> f[]`, over which `loss_sum` is; None: over the same weight as the contribution."""

    scale: Callable[[types.PyTree], jax.Array] | None = None
    """`sums -> f[]` of a rule that weighs itself: the mean contribution is multiplied by the mean
    of the workers' scales, which count as the contributions do."""

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


class Observed(NamedTuple):
    """What an order's observer needs of a rule whose contribution is the objective's gradient."""

    losses: Callable[[types.Microbatch, jax.Array], ordering.Losses]
    """`(microbatch, rng) -> losses` for it: `losses.masked` of the run's `loss_fn`; others are
    refused."""

    take: Callable[..., tuple[types.PyTree, types.PyTree]]
    """`(worker, sums, loss_sum, weight_sum, grad_parts) -> (worker, sums)`, in place of `add`
    where an observer has computed the gradient, the sum of the trees `grad_parts`. `weight_sum` is
    the `.sum()` of the weights that `losses` gives."""

    divisor: int = 1
    """What `losses` are divided by; `take` multiplies what it is given by it."""


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

    checked: Callable[[types.PyTree, types.PyTree], types.PyTree] = lambda *both: both
    """`(worker, sums) -> tree`: what must be finite after a microbatch. By default all; a rule that
    can judge a microbatch more cheaply puts its judgement into one of its sums and gives that."""

    reads: Reads = Reads()
    """What the sums tell beside the contribution."""

    observed: Observed | None = None
    """What an order's observer needs. None where the contribution is not the gradient of the
    objective: then such orders are refused."""

    traits: Traits = Traits()
    """What the rule says of itself."""

    of_loss: "Callable[..., LocalRule] | None" = None
    """`(loss_fn, *, per_example_rng, metrics) -> LocalRule`: the same for the loss of the run."""

    made_by: Any = None
    """How it can be written down; None: it cannot."""


_ARGUMENTS = {"begin": 2, "add": 5, "finish": 3, "init": 1, "checked": 2}


def for_a_loss(name: str, of_loss: Callable[..., LocalRule], traits: Traits) -> LocalRule:
    """A rule for whatever the loss of a run will be.

    Args:
        name: of its factory, for a message.
        of_loss: as of `LocalRule`.
        traits: of it.
    """

    def no_loss(*given: Any) -> Any:
        raise ValueError(f"{name}: give it as rule= to fit, Run or make_train_step")

    return of_loss(no_loss)._replace(of_loss=of_loss, traits=traits)


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
        wrong = f"its {of_function}" if of_function else _wrong_records(rule)
    if wrong:
        raise ValueError(
            f"rule: {wrong}; it must be a hetjax.LocalRule(begin, add, finish), such as "
            "hetjax.local.gradients.gradient_sums(loss_fn)"
        )


def _wrong_records(rule: LocalRule) -> str:
    reads, traits, observed = rule.reads, rule.traits, rule.observed
    for name, kind in {"reads": Reads, "traits": Traits, "observed": Observed}.items():
        given = getattr(rule, name)
        if not isinstance(given, kind) and (given is not None or kind is not Observed):
            return f"its {name} is {parts.shown(given)} and no rules.{kind.__name__}"
    parts.choice("mean", "fresh").check("rule.traits.resized", traits.resized)
    if observed is not None and not (callable(observed.losses) and callable(observed.take)):
        return "it has only one of losses and take; an order's observer needs both"
    if bool(reads.metrics) != (reads.metric_sums is not None):
        return "it has only one of metrics and metric_sums; a rule with metrics needs both"
    if reads.weight_grads is not None and reads.loss_sum is None:
        return "it has weight_grads and no loss_sum, whose mean these are multiplied by"
    if traits.weighs_itself and reads.loss_sum is not None and reads.loss_weight is None:
        return "it weighs itself and has a loss_sum without a loss_weight"
    if not traits.weighs_itself and (traits.by_share or reads.scale is not None):
        return "it has by_share or a scale, and does not weigh itself"
    return ""
