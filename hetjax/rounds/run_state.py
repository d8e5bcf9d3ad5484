"""The records of a run that steps: its state, what a round is to do, and what came of it."""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import gates, types
from hetjax.comm import allgather_work
from hetjax.data import stream as stream_lib
from hetjax.local import stepped
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import sync

Shapes = dict[str, tuple[int, ...]]


class Generations:
    """The states that follow from one `init` or `restore`; only the newest of them is whole.

    Args:
        run: that made the first of them.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.newest = run, 0


class RoundsState(NamedTuple):
    """What the rounds to come depend on, on the host. A round spends it."""

    policies: dict[str, Any]  # of each kind of round, what its quota policy knows
    stream: stream_lib.StreamState
    passes: np.ndarray  # i64[W]: that each worker's order is in, as its device part knows
    generations: Generations
    rounds_done: int = 0
    generation: int = 0


class RunState(NamedTuple):
    """A run between two rounds. `Run.round` spends it: its buffers become the next state's."""

    train: types.TrainState
    carried: types.Carried | tuple[()]  # into the next round; in no checkpoint
    signed: bool | None  # whether `carried` is for a round that finds signs; in no checkpoint
    rounds: RoundsState

    @property
    def stream(self) -> stream_lib.StreamState:
        """Orders, what is left of them, and the ledger."""
        return self.rounds.stream

    @property
    def rounds_done(self) -> int:
        return self.rounds.rounds_done


def check_state(state: Any, run: Any) -> RoundsState:
    """Refuses what is no state, a state of another run, and one that is spent.

    Returns:
        what of it lies on the host.

    Raises:
        ValueError: it is one of them, or the run is closed; says which state to give.
    """
    if not isinstance(state, RunState | RoundsState):
        raise ValueError(
            f"Run: got a {type(state).__name__}; give a state that init, restore or round returned"
        )
    rounds = state.rounds if isinstance(state, RunState) else state
    if rounds.generations.run is not run:
        raise ValueError("Run: this state is another run's; give one of this run's")
    if run.is_closed:
        raise ValueError("Run: this run is closed; make another and restore the state")
    if rounds.generation != rounds.generations.newest:
        raise ValueError(
            f"Run: this state is spent: generation {rounds.generation}, the newest is "
            f"{rounds.generations.newest}. Write state, report = run.round(state)"
        )
    return rounds


def check_given(given: types.PyTree, shapes: Shapes) -> None:
    """Refuses values of a round that are not of the shapes that its kind began with.

    Raises:
        ValueError: they are not.
    """
    if shapes_of(given) != shapes:
        raise ValueError(
            f"Run: given has {_described(shapes_of(given))}, and this kind of round began with "
            f"{_described(shapes)}"
        )


def shapes_of(given: types.PyTree) -> Shapes:
    """Of each array, by its path."""
    paths = jax.tree.leaves_with_path(given)
    return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in paths}


def _described(shapes: Shapes) -> str:
    of_each = [f"{path} {list(shape)}".strip() for path, shape in shapes.items()]
    return f"arrays of shapes {', '.join(of_each)}" if shapes else "no arrays"


class Plan(NamedTuple):
    """What a round is to do."""

    rounds: RoundsState  # that it spends
    local: stepped.LocalPlan
    quotas: np.ndarray  # i64[W]
    caps: np.ndarray  # i64[W]; 0 of absent workers
    passes: np.ndarray  # i64[W]
    signed: bool  # whether the order needs signs of its examples
    active: types.Exchanges  # exchanges of a reducer that gossips: bool[M], or ()
    programs: setup_lib.Programs  # that it runs
    closing: gates.Closing | None = None  # on the virtual clock, by a gate
    policy: Any = None  # after it has assigned the quotas
    given: types.PyTree = ()  # values of the round, the same for all workers
    is_again: bool = False  # its microbatches are those of a round that is past


def digests_of(local: stepped.LocalPlan, active: types.Exchanges) -> tuple[int, ...]:
    """Numbers, for each of `allgather_work.PLANNED`: the same where two plans of a round are.

    All that decides what a process computes in the round and which collectives it takes part in;
    `active` as of a `Plan`.
    """
    index, assigned, limits, _, may_close = local
    parts = {
        "examples": (assigned.example_ids, assigned.passes),
        "quotas": (assigned.starts, limits, may_close),
        "exchanges": (active,),
    }
    return tuple(_number_of((index or 0, *parts[name])) for name in allgather_work.PLANNED)


def _number_of(integers: tuple[Any, ...]) -> int:
    content = b"".join(np.ascontiguousarray(part, np.int64).tobytes() for part in integers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little")


class Executed(NamedTuple):
    """What came of a plan."""

    plan: Plan
    work: types.Work
    sums: sync.Synchronised
    asked: allgather_work.Request
