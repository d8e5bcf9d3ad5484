"""Example orders."""

from hetjax.ordering.balance import balance_signs
from hetjax.ordering.herding import parallel_herding_bound
from hetjax.ordering.methods import ORDERINGS, d_grab, random_reshuffling
from hetjax.ordering.ordering import Observer, Options, Ordering, OrderState

__all__ = [
    "ORDERINGS",
    "Observer",
    "Options",
    "OrderState",
    "Ordering",
    "balance_signs",
    "d_grab",
    "parallel_herding_bound",
    "random_reshuffling",
]
