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

from hetjax import parts
from hetjax.ordering.herding import parallel_herding_bound as parallel_herding_bound
from hetjax.ordering.methods import d_grab as d_grab
from hetjax.ordering.methods import d_grab_exact as d_grab_exact
from hetjax.ordering.methods import frozen as frozen
from hetjax.ordering.methods import grab as grab
from hetjax.ordering.methods import grab_random_sign as grab_random_sign
from hetjax.ordering.methods import pair_balance as pair_balance
from hetjax.ordering.methods import pair_balance_exact as pair_balance_exact
from hetjax.ordering.ordering import Observer as Observer
from hetjax.ordering.ordering import Ordering as Ordering
from hetjax.ordering.ordering import OrderState as OrderState
from hetjax.ordering.ordering import Sizes as Sizes
from hetjax.ordering.orders import block_reshuffling as block_reshuffling
from hetjax.ordering.orders import fixed_map as fixed_map
from hetjax.ordering.orders import random_reshuffling as random_reshuffling
from hetjax.ordering.orders import shuffle_once as shuffle_once
from hetjax.ordering.orders import synchronised_reshuffling as synchronised_reshuffling

if TYPE_CHECKING:
    from hetjax.ordering.balance import balance_signs as balance_signs

ORDERINGS: dict[str, Callable[..., Ordering]] = parts.by_name(
    random_reshuffling,
    synchronised_reshuffling,
    shuffle_once,
    fixed_map,
    block_reshuffling,
    frozen,
    grab,
    grab_random_sign,
    pair_balance,
    pair_balance_exact,
    d_grab,
    d_grab_exact,
)


def __getattr__(name: str) -> Any:
    if name == "balance_signs":
        return getattr(importlib.import_module("hetjax.ordering.balance"), name)
    raise AttributeError(f"module 'hetjax.ordering' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "balance_signs"])
