"""An ordering of one's own, without signs: each pass is the one before, rotated.

hetjax.fit(…, ordering=rotated(by=3))
"""

from typing import Annotated, NamedTuple

import numpy as np

import hetjax


class State(NamedTuple):
    order: np.ndarray  # i32[num_examples]
    num_placed: int  # examples of this pass that were committed
    pass_index: int


@hetjax.parts.factory
def rotated(
    *, by: Annotated[int, hetjax.parts.integer(at_least=1, unit="examples", says="a pass")] = 1
) -> hetjax.ordering.Ordering:
    """The order of the data set, begun `by` examples later in each pass."""

    def init(num_examples, seed):
        return State(np.arange(num_examples, dtype=np.int32), 0, 0)

    def place(state, realised_examples, example_signs):
        num_placed = state.num_placed + len(realised_examples)
        if num_placed < len(state.order):
            return state._replace(num_placed=num_placed)
        return State(np.roll(state.order, -by), 0, state.pass_index + 1)

    return hetjax.ordering.Ordering(init, place)
