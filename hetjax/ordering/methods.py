"""The orderings by signs: where an order comes from, and which part of it runs on the devices.

Only NumPy: that part is imported when a run makes it.
"""

import importlib
from collections.abc import Callable
from typing import Annotated, Any

from hetjax import parts
from hetjax.ordering import orders
from hetjax.ordering.ordering import Observer, Ordering, Sizes

BlockPairs = Annotated[
    int,
    parts.integer(
        at_least=1,
        unit="pairs",
        says="that get their signs at once, by the running sum before them",
    ),
]


BalanceEvery = Annotated[
    int,
    parts.integer(
        at_least=1,
        unit="passes",
        says="of which the first makes the order anew; the others keep it, by plain steps",
    ),
]

Balances = Callable[[int], bool] | None  # `Ordering.balances`


def _balanced(
    module: str,
    maker: str,
    *,
    coordinated: bool = False,
    balances: Balances = None,
    in_pairs: bool = True,
    **options: Any,
) -> Ordering:
    """An order by signs, which `hetjax.ordering.MODULE.MAKER(sizes, **options)` finds with JAX."""

    def make_observer(sizes: Sizes) -> Observer:
        if in_pairs and (size := sizes.microbatch_size) % 2:
            raise ValueError(
                f"microbatch_size: got {size}, must be even: this order balances pairs of examples"
            )
        home = importlib.import_module(f"hetjax.ordering.{module}")
        return getattr(home, maker)(sizes, **options)

    made = orders.balanced()
    if balances is not None:
        made = orders.made_of(made, balances)
    return Ordering(*made, make_observer=make_observer, coordinated=coordinated, balances=balances)


def _every(passes: int) -> Balances:
    return None if passes == 1 else lambda pass_index: pass_index % passes == 0


@parts.factory
def d_grab(*, block_pairs: BlockPairs = 16, balance_every: BalanceEvery = 1) -> Ordering:
    """Two-level balancing without gradients of single examples: the one to take for training.

    Args:
        block_pairs: pairs that get their signs at once, by the running sum before them; all pairs
            of a microbatch if its loss has to be taken as a whole.
        balance_every: passes. Of so many passes the first makes the order anew. The others keep it;
            their steps are those of a run without an order.

    References:
        Cooper, Guo, et al., "Coordinating distributed example orders for provably accelerated
        training", 2023, arXiv 2302.00845; `matrix_free.two_level` says how it departs from it.
    """
    return _two_level(_every(balance_every), block_pairs)


def _two_level(balances: Balances, block_pairs: int) -> Ordering:
    return _balanced(
        "matrix_free", "two_level", coordinated=True, balances=balances, block_pairs=block_pairs
    )


@parts.factory
def frozen(
    *,
    block_pairs: BlockPairs = 16,
    freeze_after: Annotated[
        int, parts.integer(unit="passes", says="after which the order is kept")
    ] = 1,
) -> Ordering:
    """`d_grab` for `freeze_after` passes; then the order they led to is kept, with plain steps."""
    return _two_level(lambda pass_index: pass_index < freeze_after, block_pairs)


@parts.factory
def grab() -> Ordering:
    """GraB by each worker alone: gradients less the mean of the pass before, one by one."""
    return _balanced("per_example", "grab", in_pairs=False)


@parts.factory
def grab_random_sign(
    *,
    random_scale: Annotated[
        float, parts.number(above=0.0, says="c of the signs: P(+) = 1/2 - <r, v> / 2c")
        # About the largest c that costs nothing on 10⁴ unit vectors, d = 16. The bound of one
        # worker after 10 epochs: 1.67 with sure signs; c = 0.3 1.68, 1 2.07, 3 3.14.
    ] = 0.3,
) -> Ordering:
    """GraB with random signs, the surer the larger the inner product."""
    return _balanced("per_example", "grab", in_pairs=False, random_scale=random_scale)


@parts.factory
def pair_balance(*, block_pairs: BlockPairs = 16, balance_every: BalanceEvery = 1) -> Ordering:
    """PairBalance in blocks by each worker alone, without gradients of single examples."""
    balances = _every(balance_every)
    return _balanced("matrix_free", "alone", balances=balances, block_pairs=block_pairs)


@parts.factory
def pair_balance_exact(*, balance_every: BalanceEvery = 1) -> Ordering:
    """PairBalance by each worker alone, by the gradient of every example."""
    return _balanced("per_example", "pair_balance", balances=_every(balance_every))


@parts.factory
def d_grab_exact(*, balance_every: BalanceEvery = 1) -> Ordering:
    """D-GraB as in the paper, by the gradient of every example."""
    return _balanced("per_example", "d_grab", coordinated=True, balances=_every(balance_every))
