"""The records that flow through one round. Pure data: no behaviour, no host state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any
Exchanges = jax.Array | np.ndarray | tuple[()]
"""Which exchanges of a reducer that gossips a round has, bool[M]; () of others."""
NO_AVERAGE = "this run keeps no average; give ema=, such as ema=0.999"


class Losses(NamedTuple):
    """What a loss function may return, beside bare losses and `(losses, weights)`.

    An update descends `sum(weights * losses) / sum(weights)` over its round, whose derivative it is
    also where the weights depend on the parameters; `jax.lax.stop_gradient` makes them constant. As
    the second value of a tuple such weights are refused. A metric is reported as its weighted mean
    over the round and changes nothing.

    Example:
        >>> def loss_fn(params, batch, rng):
        ...     scores = batch["x"] @ params
        ...     is_right = (scores > 0) == (batch["y"] > 0)
        ...     return Losses((scores - batch["y"]) ** 2, metrics={"accuracy": is_right})
    """

    losses: Any  # f[B], one an example; or f[B, ...], such as one a token, with weights like it
    weights: Any = None  # of the shape of the losses, such as a mask of tokens; None: 1 each
    metrics: Mapping[str, Any] | None = None
    """By name, each [B], or of the losses' shape; weighted as the losses are. Or `(values,
    weights)`, two arrays of one shape, where it has weights of its own."""


class OfParts:
    """A metric that is a function of parts, on the host."""

    def __init__(self, function: Callable[..., float], *parts: Any) -> None:
        self.function, self.parts = function, parts

    def __init_subclass__(cls) -> None:
        def made(function: Callable[..., float], parts: Any) -> Any:
            return cls(function, *parts)

        jax.tree_util.register_pytree_node(cls, lambda it: (it.parts, it.function), made)


class OfMeans(OfParts):
    """A metric of a whole set that is no mean itself, but follows from means.

    Each part is what a metric may be: one number an example, `[B]`, or `(values, weights)`.

    Attributes:
        function: from the mean of each part, a float, to the metric.
        parts: whose means are taken over the set.

    Example:
        >>> import math
        >>> def metrics_fn(params, batch):
        ...     losses = (batch["x"] - params) ** 2
        ...     return {"loss": losses, "rmse": OfMeans(math.sqrt, losses)}
    """


class Collected(OfParts):
    """A metric of a whole set that no means tell, such as AUC or mAP.

    Each part is an array with an example axis, `[B, ...]`, of any type. The parts are collected
    over the set, in its order and without padding, and handed to the function on the host.

    Attributes:
        function: from each part as a NumPy array `[N, ...]` to the metric, one number.
        parts: the arrays that are collected.

    Example:
        >>> def auc(scores, is_positive):  # the share of pairs in the right order; no ties
        ...     places = scores.argsort().argsort()[is_positive]
        ...     positives = len(places)
        ...     pairs = positives * (len(scores) - positives)
        ...     return (places.sum() - positives * (positives - 1) / 2) / pairs
        >>> def metrics_fn(params, batch):
        ...     return {"auc": Collected(auc, batch["x"] @ params, batch["y"] > 0)}
    """


class Microbatch(NamedTuple):
    """A block of examples of fixed shape: the unit of a quota.

    Leading axes may be added (`[num_workers, max_microbatches]` in the fused form).
    """

    example_ids: jax.Array | np.ndarray  # i32[microbatch_size], -1 = padding
    example_mask: jax.Array | np.ndarray  # f32[microbatch_size], 1 = example, 0 = padding
    examples: PyTree  # leaves [microbatch_size, ...]; padding is any finite example


class Named(NamedTuple):
    """What a loss, a metric or a rule may ask for by name."""

    frozen: PyTree = ()  # arrays that nothing changes, the same for all workers: `fit(frozen=)`
    values: PyTree = ()  # as the round before left them: `fit(values=)`


UNNAMED = Named()


class Model(NamedTuple):
    """Parameters and state of a model that keeps one, without worker axis."""

    params: PyTree
    state: PyTree
    named: Named = UNNAMED


class Shared(NamedTuple):
    """What a round hands out to a worker. The worker changes nothing in it."""

    params: PyTree  # the worker's replica
    given: PyTree = ()  # values of this round, the same for all workers, e.g. a vector
    model_state: PyTree = ()  # of the model, as the round begins; () where it keeps none
    named: Named = UNNAMED  # `frozen` in a rule's `add` alone
    progress: PyTree = ()  # f[]: nominal rounds of the run that are done; in a rule's `begin` alone


class Tally(NamedTuple):
    """What the local phase counts of a worker's round, whatever its local rule is."""

    example_count: jax.Array  # i32[]: examples that entered the sums
    microbatches_done: jax.Array  # i32[]
    nonfinite_microbatch: jax.Array  # i32[]: position of the first one in the round, -1 = none


class Carried(NamedTuple):
    """What a worker carries from microbatch to microbatch. No shape depends on the quota."""

    worker: PyTree  # what the local rule keeps
    sums: PyTree  # of the local rule; in float32 or wider
    evidence: PyTree  # of the order's observer; () where the order needs none
    tally: Tally


class StateChange(NamedTuple):
    """What microbatches change of a model's state, added up.

    Two are trees like the state, with None in the place of other leaves.
    """

    means: PyTree  # sums over the examples, to be divided by their number
    sums: PyTree
    alike: dict[str, jax.Array]
    """f32[bits + 1] of each whole number: of how many microbatches a bit is set; of how many."""


class Counts(NamedTuple):
    """How much a worker counts whose rule weighs itself."""

    weight: jax.Array  # f[]: of its contribution, which is a sum over it
    scale: jax.Array  # f[]: the mean contribution is multiplied by the workers' mean of it


class Contribution(NamedTuple):
    """What a worker hands to the synchronisation at the end of its round."""

    sums: PyTree  # the local rule's, over the examples of the round
    weight: jax.Array  # f32[]: summed over the workers too; it divides `sums`, or `counts` do
    loss_sum: jax.Array  # f32[]: for the report, over the weight; 0 where the rule has none
    worker: PyTree  # what the local rule keeps for the next round; () where it keeps nothing
    evidence: PyTree  # what the order's observer found of the round; () where there is none
    tally: Tally
    metric_sums: PyTree = ()  # {name: (f32[] weighted sum, f32[] weight)}; () where there are none
    own: PyTree = ()  # sums that stay with the worker: divided as `sums` are, but not added up
    weight_grads: PyTree = ()  # like `sums`, where weights vary with the parameters: `LocalRule`
    state_change: PyTree = ()  # a `StateChange`; () where the rule changes no state of the model
    counts: PyTree = ()  # `Counts`, of a rule that weighs itself


class Kept(NamedTuple):
    """What a round without update leaves of a worker. Leaves have a worker axis."""

    memory: PyTree = ()  # as of `TrainState`
    worker: PyTree = ()
    model_state: PyTree = ()
    values: PyTree = ()
    progress_rounds: PyTree = ()


def shared(params: PyTree, given: PyTree, kept: Any, frozen: PyTree = ()) -> Shared:
    """What a round hands out, of what workers have `Kept`."""
    return Shared(params, given, kept.model_state, Named(frozen, kept.values))


class TrainState(NamedTuple):
    """The training state. Every leaf has a leading axis `num_workers` over the worker axis.

    Keep the order of the fields: a donated buffer becomes the first result of its shape. So the
    sums and the evidence of a round become `params` and `memory` without a copy.
    """

    params: PyTree
    memory: PyTree  # of the order's observer; () where the order needs none
    opt_state: PyTree  # of the optimiser; () where no round updates
    worker: PyTree  # of the local rule; () where it keeps nothing from round to round
    progress_rounds: jax.Array | np.ndarray  # f32[W]: examples processed over those of a full round
    model_state: PyTree = ()  # of the model; () where it keeps none
    average: PyTree = ()  # a `Model`: of both over the rounds, float32 or wider; () without `ema`
    progress_rest: PyTree = ()  # f32[W]: by how much `progress_rounds`, in float32, is too large
    values: PyTree = ()  # for the next round, of `fit(values=)`

    @property
    def kept(self) -> Kept:
        """What a round without update changes, too."""
        of_run = self.model_state, self.values, self.progress_rounds
        return Kept(self.memory, self.worker, *of_run)


class UpdateSize(NamedTuple):
    """How far an update went. With a reducer that gossips, means over the workers that updated."""

    grad_norm: jax.Array  # f[]: of the reduced gradient, before the optimiser clips it
    update_norm: jax.Array  # f[]: of what is added to the parameters
    learning_rate: jax.Array  # f[]: as the optimiser's state tells it; NaN where it does not
    values: PyTree = ()  # {path: f[]} of the numbers among `fit(values=)` in this round
    left_out: Any = ()  # bool[]: what is not finite was not added; () where the run stops at it


class SyncMetrics(NamedTuple):
    """What a synchronisation tells the host, the same on every worker."""

    loss_sum: jax.Array  # f32[]; read as NaN where the local rule adds up none
    weight_sum: jax.Array  # f32[]
    example_count: jax.Array  # i32[W]: examples that entered the sums
    microbatches_done: jax.Array  # i32[W]
    nonfinite_microbatch: jax.Array  # i32[W], -1 = none
    worker_losses: jax.Array  # f32[W]: of `loss_sum`, what each worker's examples make
    worker_weights: jax.Array  # f32[W]: weight of what each worker did
    metric_sums: PyTree = ()  # as in `Contribution`, of all workers
    unlike: PyTree = ()  # bool[] by name: the model's whole numbers that have no one new value
    counts: PyTree = ()  # `Counts` f[W], of a rule that weighs itself


class Work(NamedTuple):
    """What workers did in a round, those of this process or all; times by each one's own clock."""

    microbatches_done: np.ndarray  # i64[w]
    first_secs: np.ndarray  # f64[w], round start to end of the first microbatch; NaN = unknown
    compute_secs: np.ndarray  # f64[w]
    overruns: np.ndarray  # i64[w], microbatches slower than the emulated worker would have been
    example_signs: list[np.ndarray] | None = None  # i8[done, B] of each; None: no order takes them
    host_secs: np.ndarray = np.zeros(1)  # f64[W]: of its process beside compute; [1]: not known
    local_secs: float = 0.0  # until the last worker finished, once all are gathered
