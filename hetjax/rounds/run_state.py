"""The records of a run that steps: its state, what a round is to do, and what came of it."""

import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import gates, types
from hetjax.data import stream as stream_lib
from hetjax.processes import gathering
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import sync

Shapes = dict[str, tuple[int, ...]]


class Generations:
    """The states that follow from one `init` or `restore`; the newest of them alone is whole.

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
    full_quotas: np.ndarray  # i64[W], of the last round of the whole budget; 0: none yet
    rounds_done: int
    generations: Generations
    generation: int


class RunState(NamedTuple):
    """A run between two rounds. `Run.round` spends it: its buffers become the next state's."""

    train: types.TrainState
    carried: types.Carried | tuple[()]  # into the next round; in no checkpoint
    signed: bool | None  # whether `carried` is for a round that finds signs; in no checkpoint
    rounds: RoundsState

    @property
    def policies(self) -> dict[str, Any]:
        """Of each kind of round, what its quota policy knows."""
        return self.rounds.policies

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
            f"Run: got a {type(state).__name__}; give the state that init, restore or the round "
            "before returned"
        )
    rounds = state.rounds if isinstance(state, RunState) else state
    if rounds.generations.run is not run:
        raise ValueError(
            "Run: this state is another run's, and nothing was computed; give one that this run's "
            "init, restore or round returned"
        )
    if run.is_closed:
        raise ValueError(
            "Run: this run is closed; make another Run, and restore the state from a checkpoint"
        )
    if rounds.generation != rounds.generations.newest:
        raise ValueError(
            f"Run: this state is spent: it is of generation {rounds.generation}, and the newest is "
            f"{rounds.generations.newest}. A round takes over the buffers of the state that it is "
            "given: write state, report = run.round(state)"
        )
    return rounds


def check_given(given: types.PyTree, shapes: Shapes | None) -> None:
    """Refuses values of a round that are not of the shapes that its kind began with.

    Raises:
        ValueError: they are not.
    """
    if shapes is not None and shapes_of(given) != shapes:
        raise ValueError(
            f"Run: given has {_described(shapes_of(given))}, and this kind of round began with "
            f"{_described(shapes)}; give init or restore values of the same shapes, "
            "such as run.init(given=jax.tree.map(np.zeros_like, given))"
        )


def shapes_of(given: types.PyTree) -> Shapes:
    """Of each array, by its path."""
    paths = jax.tree.leaves_with_path(given)
    return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in paths}


def _described(shapes: Shapes) -> str:
    of_each = [f"{path} {list(shape)}".strip() for path, shape in shapes.items()]
    return f"arrays of shapes {', '.join(of_each)}" if shapes else "no arrays"


def digests_of(
    plan: stream_lib.Assignment,
    round_index: int,
    *,
    limits: np.ndarray,
    active: Any,
    may_close: bool = True,
) -> tuple[int, ...]:
    """Numbers, for each of `gathering.PLANNED`: the same where two plans of a round are.

    All that decides what a process computes in the round and which collectives it takes part in.

    Args:
        plan: the microbatches of all workers.
        round_index: the round.
        limits: i64[W]: how many of them each worker does, where the clock is virtual.
        active: bool[M], the exchanges that the sync phase is told of, or ().
        may_close: whether a gate may close it.
    """
    parts = {
        "examples": (plan.example_ids, plan.passes),
        "quotas": (plan.starts, limits, may_close),
        "exchanges": (active,),
    }
    return tuple(_number_of((round_index, *parts[name])) for name in gathering.PLANNED)


def _number_of(integers: tuple[Any, ...]) -> int:
    content = b"".join(np.ascontiguousarray(part, np.int64).tobytes() for part in integers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little")


class Plan(NamedTuple):
    """What a round is to do."""

    state: RunState | RoundsState
    round_index: int | None  # None: warms up
    epoch: int
    assigned: stream_lib.Assignment
    quotas: np.ndarray  # i64[W]
    limits: np.ndarray  # i64[W]: microbatches that each worker does, where that is known before
    caps: np.ndarray  # i64[W]
    present: np.ndarray  # bool[W]
    is_full: bool  # of the whole budget
    may_close: bool  # by a gate
    closing: gates.Closing | None  # on the virtual clock, by a gate
    policy: Any  # after it has assigned the quotas
    passes: np.ndarray  # i64[W]
    signed: bool  # whether the order needs signs of its examples
    active: Any  # exchanges of a reducer that gossips: bool[M], or ()
    kind: str  # of round
    programs: setup_lib.Programs  # that it runs
    given: types.PyTree = ()  # values of the round, the same for all workers
    is_again: bool = False  # its microbatches are those of a round that is past
    began: float | None = None  # perf_counter when the host began with it; None: when it is done

    @property
    def rounds(self) -> RoundsState:
        """Of its state, what lies on the host."""
        return self.state.rounds if isinstance(self.state, RunState) else self.state

    def digests(self) -> tuple[int, ...]:
        """Numbers that this round's plans of all processes share when they are the same."""
        return digests_of(
            self.assigned,
            self.round_index or 0,
            limits=self.limits,
            active=self.active,
            may_close=self.may_close,
        )


class Executed(NamedTuple):
    """What came of a plan."""

    plan: Plan
    work: types.Work
    sums: sync.Synchronised
    asked: gathering.Request
