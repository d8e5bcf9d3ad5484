"""What the processes of a run do together: membership, messages, sums, rows to neighbours.

A `Communicator` is what the rounds know of other processes. `backends` has a class for each way to
communicate, and chooses. No other module asks which it is.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types, wires


class Sums:
    """How the contributions of a kind of round are added up; here only by the sync program."""

    meet_before = False
    """Whether the sums are complete when the sync phase begins, which then waits for no process."""

    totals: Callable | None = None
    """`contributed -> sums`, traceable: what the sync phase makes of the result of `total`. None:
    the sync phase sums by itself."""

    def copies(self, present: int) -> tuple[float, float]:
        """How many contributions, and how many sums, so many workers send each other in a round;
        here as by a ring."""
        return present - 1, present - 1

    def post(self, contributed: types.Contribution) -> None:
        """Puts up what this process's workers contributed: their rows of leaves `[W, ...]`."""

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        """What the sync phase takes of the contributions; call it when all have posted.

        Args:
            contributed: what was posted.
            host_secs: f64[W], what each worker's process needed between its last two local phases.
        """
        return contributed


class Communicator:
    """A process that is alone and has all workers. It tells no other, and sums in the sync program.

    Args:
        num_workers: W.
    """

    alone = True
    """Whether this process has all workers."""

    across = False
    """Whether sums that meet before the sync program wait for other machines, too."""

    has_collectives = True
    """Whether programs of JAX reach all workers. By these a worker's row goes to its neighbours,
    inside the sync program (`topology/reducers.py`). Else processes add up one plain sum alone."""

    no_collectives = "processes of this run share a GPU, and JAX has no collectives for such. "
    """Why there are none."""

    carries_more = False
    """Whether without collectives changes of the model's state meet as the sums do, and a rule may
    keep something of a worker, which is lost with it."""

    responded: slice | np.ndarray = slice(None)
    """Of the workers: whose messages `allgather` returned."""

    changes: Sequence[tuple[int, str]] = ()
    """(worker, what) of the workers that came and went in the last round, as a report has it."""

    incarnation = 0
    """Of this process: a start of it in the place of one that ended has a higher one."""

    run_id = ""
    """Of the attempt, whose processes may lead in turn; "": one process leads to the end."""

    round_number = 0
    """Of the round that has begun: the same in all processes that are in it, and in no other."""

    keeps_memory = False
    """Whether malloc keeps freed memory: `use_cpu_workers` or the launcher has told it."""

    def __init__(self, num_workers: int) -> None:
        self.process_of = np.zeros(num_workers, int)
        """i64[W]: the process of each worker."""

    @property
    def present(self) -> np.ndarray:
        """bool[W]: the members of the next round."""
        return np.ones(len(self.process_of), bool)

    @property
    def joins(self) -> bool:
        """Whether this process is to be taken into a run that goes on (`receive_state`)."""
        return False

    def start_barrier(self, state: types.PyTree = ()) -> None:
        """Before a round is planned: waits for the processes that begin the run with this one.

        Args:
            state: of the run.
        """

    def begins(self, round_index: int | None, point: types.PyTree) -> None:
        """A round begins at a point; None: it warms up, and no other process is told."""
        self.round_number += 1

    def allgather(self, messages: np.ndarray) -> np.ndarray:
        """Returns the messages of all workers, [W], given those of this process's workers, [w].

        Args:
            messages: an array of a structured type that is the same in all processes. Those of a
                worker that has told nothing are zeros.

        Raises:
            LostProcessError: a process has ended.
        """
        return messages

    def sums(
        self, like: types.PyTree, wire: str = wires.FLOAT32, layout: mesh_lib.Layout | None = None
    ) -> Sums:
        """How the contributions of a round are added up; the same answer in all processes.

        Args:
            like: a pytree of the shapes and types of what a worker contributes.
            wire: of `wires.WIRES`; other than float32 where workers come and go alone.
            layout: of the arrays on each worker's slice, if it has one.
        """
        return Sums()

    def sends_state(self) -> bool:
        """Whether this process is to hand the state to newcomers now (`send_state`)."""
        return False

    def send_state(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Hands the state of the last round, as a checkpoint has it, to newcomers."""

    def receive_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Waits until this newcomer is a member; what it is handed, as `send_state` got it."""
        raise NotImplementedError

    def keep(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Keeps what this process, which leads, has judged, for the next leader."""

    def kept(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """What the last leader has kept (`keep`); None: nothing."""
        return None

    def outlives_leader(self) -> bool:
        """Waits, after the last round, until all that the run leaves is written.

        Returns:
            whether the process that leads is gone instead, and this one leads in its place.
        """
        return False

    def leaves_by(self, number: signal.Signals) -> bool:
        """Whether this process leaves after its round by a signal, and the run goes on without it.
        Else the signal ends the run."""
        return False

    def close(self) -> None:
        """Ends the connections to other processes, when all that the run leaves is written."""
