"""Example orders."""

from hetjax.ordering.methods import ORDERINGS, random_reshuffling
from hetjax.ordering.ordering import Ordering, OrderState, Signs

__all__ = ["ORDERINGS", "OrderState", "Ordering", "Signs", "random_reshuffling"]
