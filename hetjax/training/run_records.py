"""The records of a run that steps: its state, what a round is to do, and what came of it."""

from typing import Any, NamedTuple

import numpy as np

from hetjax import gates, types
from hetjax.data import rounds as rounds_lib
from hetjax.training import agreement, sync


class Lineage:
    """The states that follow from one `init` or `restore`; the newest of them alone is whole.

    Args:
        run: that made the first of them.
    """

    def __init__(self, run: object) -> None:
        self.run, self.newest = run, 0


class RunState(NamedTuple):
    """A run between two rounds. `Run.round` spends it: its buffers become the next state's."""

    train: types.TrainState
    carried: types.Carried  # before the first microbatch of the next round; in no checkpoint
    policies: dict[str, Any]  # of each kind of round, what its quota policy knows
    stream: rounds_lib.StreamState
    passes: np.ndarray  # i64[W]: that each worker's order is in, as its device part knows
    full_quotas: np.ndarray  # i64[W], of the last round of the whole budget; 0: none yet
    rounds_done: int
    lineage: Lineage
    generation: int


def check_state(state: Any, run: object) -> None:
    """Refuses what is no state, a state of another run, and one that is spent.

    Raises:
        ValueError: it is one of them; says which state to give.
    """
    if not isinstance(state, RunState):
        raise ValueError(
            f"Run.round: got a {type(state).__name__}; give the state that init, restore or "
            "the round before returned"
        )
    if state.lineage.run is not run:
        raise ValueError(
            "Run.round: this state is another run's; give one that this run's init, restore "
            "or round returned"
        )
    if state.generation != state.lineage.newest:
        raise ValueError(
            f"Run.round: this state is spent: it is of generation {state.generation}, and the "
            f"newest is {state.lineage.newest}. A round takes over the buffers of the state "
            "that it is given: write state, report = run.round(state)"
        )


class Plan(NamedTuple):
    """What a round is to do."""

    state: RunState
    round_index: int | None  # None: warms up
    epoch: int
    rows: rounds_lib.RoundPlan
    quotas: np.ndarray  # i64[W]
    limits: np.ndarray  # i64[W]: microbatches that each worker does, where that is known before
    caps: np.ndarray  # i64[W]
    present: np.ndarray  # bool[W]
    is_full: bool  # of the whole budget
    may_close: bool  # by a gate
    closing: gates.Closing | None  # on the virtual clock, by a gate
    policy: Any  # after it has assigned the quotas
    passes: np.ndarray  # i64[W]
    active: Any  # exchanges of a reducer that gossips: bool[M], or ()
    kind: str  # of round
    given: types.PyTree = ()  # values of the round, the same for all workers


class Executed(NamedTuple):
    """What came of a plan."""

    done: agreement.Done
    clocks: agreement.Clocks
    sums: sync.Synchronised
    asked: agreement.Ask
