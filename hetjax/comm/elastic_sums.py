"""Sums of processes that are apart: one of them adds up, the others read where it has added.

The process that needed the least time for itself adds, as among processes that are joined. Where it
is dead or late, each adds on its own, in the same order, so to the same bytes. What is added lies
in memory of its adder. JAX reads it there, perhaps long after: a process that slept may read when
the others are rounds further, if it is left out of a sum. From then on what is added lies in new
memory.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.comm import double_buffer, shared_sums
from hetjax.comm import membership as membership_lib
from hetjax.comm.membership import Member
from hetjax.liveness import blocking_waits

_BESIDE = 1 << 20  # bytes of small files
_USUAL_SECS = 0.25  # an adder that needs longer sleeps
_OWN = "own"  # what a process contributes


def check_room(
    roster: membership_lib.MembershipClient, sums: Sequence["ElasticSums"], state: types.PyTree
) -> None:
    """Looks whether there is memory for a run, as long as it has all of its seats.

    For each rank two halves of what it contributes and two of what it adds, of each kind of rounds.
    Beside them lies a state that is handed on, or the memory of a worker that has just gone.

    Raises:
        ValueError: there is less.
    """
    handed = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))
    needed = 4 * roster.num_processes * sum(each.num_bytes for each in sums) + handed + _BESIDE
    where = os.statvfs(roster.directory)
    if needed > (free := where.f_bavail * where.f_frsize):
        whole = needed + (where.f_blocks - where.f_bavail) * where.f_frsize
        raise ValueError(
            f"--runtime=apart: up to {roster.num_processes} workers need {-(-needed >> 20)} MB "
            f"of shared memory, and {roster.directory.parents[1]} has {free >> 20}. Start the "
            f"container with --shm-size={-(-whole >> 20)}m, or set "
            f"{membership_lib.SHARED}=DIRECTORY"
        )


class ElasticSums(shared_sums.HostSums):
    """The sums of one kind of round: of contributions, and of changes of the model's state.

    Args:
        roster: of this process.
        mesh: of its device.
        turn: which round it is.
        like: of the shapes of what a worker's sums are.
        kind: a number of its own.
    """

    def __init__(
        self,
        roster: membership_lib.MembershipClient,
        mesh: Mesh,
        turn: double_buffer.Turn,
        like: types.PyTree,
        kind: int,
    ) -> None:
        self._roster, self._mesh, self._turn = roster, mesh, turn
        self._like, self._kind = like, kind
        self._known: dict[tuple[str, Member], double_buffer.DoubleBuffer] = {}
        self._size = sum(leaf.size for leaf in jax.tree.leaves(like))  # numbers of a contribution
        self._dtype = np.dtype(np.float32)

    def post(self, contributed: types.Contribution) -> None:
        added = contributed.sums, contributed.state_change
        mine = jax.tree.leaves(mesh_lib.worker_rows(added)[0])
        numbers = [np.asarray(leaf).reshape(-1) for leaf in mine]
        self._dtype = np.result_type(*numbers)
        self._size = sum(part.size for part in numbers)
        if self._turn.is_warm_up:
            self._alone = self._new_vector()
            np.concatenate(numbers, out=self._alone)
            return
        own = self._halves(_OWN, self._roster.own)
        np.concatenate(numbers, out=self._vector(own.begin(self._turn.number)))
        own.end(self._turn.number)

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        if self._turn.is_warm_up:
            total = self._alone
        else:
            total = self._total(host_secs)
            self._turn.number += 1
        size = sum(leaf.size for leaf in jax.tree.leaves(self._like))
        like = contributed.state_change
        change = trees.of_vector(total[size:], like)
        change = jax.tree.map(lambda part, leaf: part.astype(leaf.dtype), change, like)
        sums, change = mesh_lib.place((total[None, :size], change), self._mesh)
        return contributed._replace(sums=sums, state_change=change)

    @property
    def num_bytes(self) -> int:
        """Of a contribution; with the changes of the model's state, once one has been posted."""
        return self._size * self._dtype.itemsize

    def _vector(self, half: np.ndarray) -> np.ndarray:
        return half[: self.num_bytes].view(self._dtype)

    def _new_vector(self) -> np.ndarray:
        """Of this process only; aligned, so that JAX reads it where it lies."""
        return self._vector(np.frombuffer(mmap.mmap(-1, self.num_bytes), np.uint8))

    def _halves(self, what: str, member: Member) -> double_buffer.DoubleBuffer:
        """Where a member writes what it contributes, or what it adds.

        Raises:
            FileNotFoundError: there are none, not yet or not any more.
        """
        if (what, member) not in self._known:
            name = f"sums-{self._kind}-{what}"
            self._known[what, member] = double_buffer.of(member, name, self.num_bytes, self._roster)
        return self._known[what, member]

    def _total(self, host_secs: np.ndarray) -> np.ndarray:
        """The sum of all contributions that the view names."""
        roster, number = self._roster, self._turn.number
        members, added = roster.adopted.sum, f"{roster.adopted.since}-added"
        self.has_waited = False
        adder = min(members, key=lambda m: (host_secs[m.rank] == 0, host_secs[m.rank]))
        if adder == roster.own:
            shown = self._halves(added, adder)
            total = self._vector(shown.begin(number))
            self._add(total)
            shown.end(number)
            roster.wake(members)
        elif (theirs := self._wait_for(adder, added)) is not None:
            total = self._vector(theirs.halves[number % 2])
        else:
            total = self._new_vector()
            self._add(total)
        for what, member in list(self._known):
            if member not in (*members, *roster.adopted.members) or what not in (_OWN, added):
                del self._known[what, member]
                if member == roster.own:
                    name = f"sums-{self._kind}-{what}.{roster.incarnation}"
                    (roster.directory / name).unlink(missing_ok=True)
        return total

    def _add(self, total: np.ndarray) -> None:
        """Makes `total` the sum, unless this process has slept so long that none is left."""
        roster, number = self._roster, self._turn.number
        with contextlib.suppress(FileNotFoundError):
            own = [self._halves(_OWN, member) for member in roster.adopted.sum]
            shared_sums.add_up([self._vector(each.halves[number % 2]) for each in own], total)
            if all(each.has(number) for each in own):
                return
        roster.leave(number)

    def _wait_for(self, adder: Member, added: str) -> double_buffer.DoubleBuffer | None:
        """Where a member has added; None where it is dead or late."""
        roster, since = self._roster, time.monotonic()
        with blocking_waits.Wait("add up the sums", lambda: [adder.rank]) as wait:
            while True:
                lives, now = roster.lives(adder), time.monotonic()
                self.has_waited = now - since > _USUAL_SECS
                with contextlib.suppress(FileNotFoundError):
                    if (theirs := self._halves(added, adder)).has(self._turn.number):
                        return theirs
                if not lives or (now - since > roster.late_secs and not roster.is_busy(adder, now)):
                    return None
                wait.check()
                roster.wait(membership_lib.LOOK_SECS)
