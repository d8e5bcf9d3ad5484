"""Example orders: in which sequence examples are visited, balanced by their gradients or not.

- `ordering` says what an ordering is; `ORDERINGS` has the factories by name.
- `orders` places examples on the host; `methods` are the orders by signs.
- `matrix_free` and `per_example` find signs on the devices; `balance` has the rule of signs.
- `pairs` splits a microbatch into pairs.
- `herding` measures how good an order is.

Signs go in; the order of the next pass comes out. Imports `parts`, `trees` and `types`. The host's
part needs only NumPy; the names that need JAX are resolved when they are first used.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hetjax.ordering.herding import parallel_herding_bound
from hetjax.ordering.methods import (
    d_grab,
    d_grab_exact,
    frozen,
    grab,
    grab_random_sign,
    pair_balance,
    pair_balance_exact,
)
from hetjax.ordering.ordering import Observer, Ordering, OrderState, Sizes
from hetjax.ordering.orders import (
    block_reshuffling,
    fixed_map,
    random_reshuffling,
    shuffle_once,
    synchronised_reshuffling,
)

if TYPE_CHECKING:
    from hetjax.ordering.balance import balance_signs

ORDERINGS: dict[str, Callable[..., Ordering]] = {
    "random_reshuffling": random_reshuffling,
    "synchronised_reshuffling": synchronised_reshuffling,
    "shuffle_once": shuffle_once,
    "fixed_map": fixed_map,
    "block_reshuffling": block_reshuffling,
    "frozen": frozen,
    "grab": grab,
    "grab_random_sign": grab_random_sign,
    "pair_balance": pair_balance,
    "pair_balance_exact": pair_balance_exact,
    "d_grab": d_grab,
    "d_grab_exact": d_grab_exact,
}

__all__ = [
    "ORDERINGS",
    "Observer",
    "OrderState",
    "Ordering",
    "Sizes",
    "balance_signs",
    "block_reshuffling",
    "d_grab",
    "d_grab_exact",
    "fixed_map",
    "frozen",
    "grab",
    "grab_random_sign",
    "pair_balance",
    "pair_balance_exact",
    "parallel_herding_bound",
    "random_reshuffling",
    "shuffle_once",
    "synchronised_reshuffling",
]


def __getattr__(name: str) -> Any:
    if name == "balance_signs":
        return getattr(importlib.import_module("hetjax.ordering.balance"), name)
    raise AttributeError(f"module 'hetjax.ordering' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "balance_signs"])
