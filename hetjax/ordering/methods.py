"""The orderings by name."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetjax.ordering import ordering


class RandomReshufflingState(NamedTuple):
    order: np.ndarray  # i32[num_units]
    seed: tuple[int, ...]
    pass_index: int
    num_placed: int  # units of this pass that were committed


def random_reshuffling() -> ordering.Ordering:
    """A fresh permutation for each pass, drawn from (seed, pass) alone.

    So the order of any pass can be had without those before it, and does not depend on quotas.

    Example:
        >>> method = random_reshuffling()
        >>> state = method.init(4, (0,))
        >>> sorted(state.order.tolist())
        [0, 1, 2, 3]
        >>> method.place(state, state.order, None).pass_index
        1
    """

    def draw(num_units: int, seed: tuple[int, ...], pass_index: int) -> np.ndarray:
        return np.random.default_rng((*seed, pass_index)).permutation(num_units).astype(np.int32)

    def init(num_units: int, seed: tuple[int, ...]) -> RandomReshufflingState:
        return RandomReshufflingState(draw(num_units, seed, 0), seed, 0, 0)

    def place(
        state: RandomReshufflingState, realised_units: np.ndarray, pair_signs: np.ndarray | None
    ) -> RandomReshufflingState:
        del pair_signs
        num_placed = state.num_placed + len(realised_units)
        if num_placed < len(state.order):
            return state._replace(num_placed=num_placed)
        pass_index = state.pass_index + 1
        order = draw(len(state.order), state.seed, pass_index)
        return RandomReshufflingState(order, state.seed, pass_index, 0)

    return ordering.Ordering(init, place)


ORDERINGS: dict[str, Callable[..., ordering.Ordering]] = {
    "random_reshuffling": random_reshuffling,
}
