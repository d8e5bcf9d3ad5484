"""What an ordering is: the permutation of the examples, and how signs change it.

An ordering knows neither quotas nor data. Shared data has one state for the whole set, private data
one a shard. `place` runs on the host at the end of a round. An `Observer` runs on the devices,
inside the local and the sync phase.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetjax import parts

PyTree = Any
Losses = Callable[..., tuple[Any, Any]]
"""`(params, positions) -> (weight * loss f[k], weights f[k])` of a microbatch's examples at
`positions i32[k]`, all of them where None. The weights may be a record with a `sum()`."""


class OrderState(Protocol):
    """What every ordering's state shows; methods add fields of their own."""

    @property
    def order(self) -> np.ndarray:
        """i32[num_examples]: the order of the pass that is being worked through."""


def checked_order(state: Any, num_examples: int, maker: str) -> np.ndarray:
    """The order i[num_examples] that a state shows; refuses what is no permutation.

    Args:
        state: what a function of an ordering returned.
        num_examples: of the data set, or of the shard.
        maker: that function, as a message names it.

    Raises:
        ValueError: the order is no permutation.
    """
    order: Any = getattr(state, "order", None)
    lacks = ""
    if getattr(order, "shape", None) == (num_examples,) and order.dtype.kind in "iu":
        order, seen = np.asarray(order), np.zeros(num_examples, bool)
        seen[order[(order >= 0) & (order < num_examples)]] = True
        if seen.all():
            return order
        lacks = f" without {np.argmin(seen)}"
    raise ValueError(
        f"{maker} returned {parts.shown(state if order is None else order)}{lacks}; its order must "
        f"be a permutation i32[{num_examples}]"
    )


COUPLED = 2
"""In place of a sign: the examples of this microbatch have no gradients of their own."""


class Sizes(NamedTuple):
    """The sizes of a run, for which the part of an ordering on the devices is made."""

    num_workers: int = 1
    microbatch_size: int = 2
    max_microbatches: int = 1
    """The most that one worker does in a round. It bounds what the exact forms store."""


class Observer(NamedTuple):
    """What gathers evidence for an order on the devices, beside the local rule.

    All its functions are pure and traceable. The observer computes the gradient of a microbatch
    anyway, so the local rule takes the gradient from it.
    """

    init: Callable[[PyTree], PyTree]
    """`params -> memory`: what one worker keeps from round to round, before its first round."""

    begin_round: Callable[[PyTree], PyTree]
    """`memory -> evidence`: what a worker adds to in a round, before its first microbatch."""

    observe: Callable[..., tuple[Any, tuple, PyTree, Any]]
    """`(losses, shared, evidence, microbatch, position, rng) -> ((loss_sum, weight_sum),
    grad_parts, change, example_signs i8[B])`, for one microbatch, the `position`-th of the
    worker's round. `losses(params, positions) -> (weight * loss f32[k], weights f32[k])` evaluates
    the examples at `positions i32[k]` of the microbatch (None: all), already masked; where the loss
    computes in float16 over the microbatch's size, for which the local rule makes up. If the loss
    has metrics, the weights are a record of both; `weights.sum()` is `weight_sum` in either case.
    `grad_parts` is a tuple of trees whose sum is the gradient. `evidence` is what this worker has
    added up so far; `change`, 0 for padding, will be added to it. An example's sign is 1, -1, or 0
    for one that goes to the middle (the one without a partner). Signs of padding are ignored.
    `COUPLED` in their place stops the run."""

    coordinate: Callable[[PyTree, PyTree, str], tuple[PyTree, Any]]
    """`(memory, evidence, axis_name) -> (memory, flips)` at the end of a round, by collectives
    over `axis_name`. The example signs of a worker's round are multiplied by its `flips`, i8[] or
    i8[max_microbatches * B]."""

    coordinate_array: Callable[[PyTree, PyTree], tuple[PyTree, Any]] | None
    """The same on one device, on leaves `[num_workers, ...]`; None: `jax.vmap` of `coordinate`,
    which takes 1.5 to 3.5 times as long as `balance.coordinate_array`."""

    new_pass: Callable[[PyTree], PyTree]
    """`memory -> memory` of a worker that begins a new pass over its examples."""

    coordinated: bool = False
    """All workers share one memory: they begin a new pass together, with the epoch. The
    ordering says so, and `Ordering.observer` sets it."""

    same_memory: bool = False
    """The memory is the same numbers on all workers: on one device it is kept once."""

    dear: str = ""
    """What makes it slow with these sizes, and how to mend it, for the user; '' if nothing does."""

    compares: bool = False
    """It looks at each microbatch whether its examples see each other: see `COUPLED`."""

    sizes: Sizes | None = None
    """The only sizes that it may be used for; None: any."""

    copies_sent: float = 0.0
    """Vectors as long as the parameters that `coordinate` exchanges in a round, counted as the
    reducer's: one of each worker's round a ring is 2 (W - 1) over all workers."""


def _asked(name: str, observe: Callable[..., Any]) -> Callable[..., Any]:
    """`observe`, with a check of its signs when it is traced."""

    def asked(losses: Any, shared: Any, evidence: Any, microbatch: Any, *others: Any) -> Any:
        answer = observe(losses, shared, evidence, microbatch, *others)
        is_whole = isinstance(answer, tuple) and len(answer) == 4
        signs = answer[3] if is_whole else answer
        size = microbatch.example_ids.shape[0]
        is_array = hasattr(signs, "shape") and hasattr(signs, "dtype")
        if is_whole and is_array and signs.shape == (size,) and signs.dtype.kind == "i":
            return answer
        raise ValueError(
            f"{name}: observe of its observer returned {'the signs ' if is_whole else ''}"
            f"{parts.shown(signs)}; it must return (sums, grad_parts, change, signs i8[{size}])"
        )

    return asked


class Ordering(NamedTuple):
    """A method of ordering: `state = init(num_examples, seed)`, then `place` after each round."""

    init: Callable[[int, tuple[int, ...]], Any]
    """`(num_examples, seed) -> state`. `seed` names the stream of random numbers: the run's seed,
    and for private data the worker."""

    place: Callable[[Any, np.ndarray, np.ndarray | None], Any]
    """`(state, realised_examples i32[k], example_signs i8[k] or None) -> state`: the examples that
    were committed in this round, in (worker, position) order, without padding. The call that
    completes a pass returns a state whose `order` is the next pass's. The state that `place` is
    given is spent: it may write into its arrays, and shapes do not change."""

    make_observer: Callable[[Sizes], Observer] | None = None
    """`sizes -> the part on the devices`; None for an order that needs no gradients."""

    coordinated: bool = False
    """All workers share one running sum. So it needs a reducer that keeps the replicas equal, and
    they begin a new pass together, with the epoch."""

    balances: Callable[[int], bool] | None = None
    """Given a pass's number, from 0: whether `place` needs that pass's signs. In rounds of other
    passes the part on the devices does not run, and `place` gets None. None: it needs all."""

    made_by: parts.Made | None = None

    def observer(self, sizes: Sizes) -> Observer | None:
        """The part on the devices, for a run of these sizes; None if there is none.

        Raises:
            ValueError: `make_observer` made something else.
        """
        if self.make_observer is None:
            return None
        made = self.make_observer(sizes)
        if not isinstance(made, Observer):
            raise ValueError(
                f"ordering: {parts.named(self)}: its make_observer(sizes) made "
                f"{parts.shown(made)}; it must make a hetjax.ordering.Observer"
            )
        observe = _asked(parts.named(self), made.observe)
        return made._replace(coordinated=self.coordinated, observe=observe)
