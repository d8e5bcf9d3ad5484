"""Sums of processes that are apart: each adds a slice of all contributions, and takes the others'.

What is added lies in its adder's own memory, so a process that slept overwrites nobody's sums.
"""

import mmap
import time

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.processes import halves, shared_sums, waits
from hetjax.processes import meeting as meeting_lib
from hetjax.processes import place as place_lib
from hetjax.processes.place import Member


class ApartSums(meeting_lib.Sums):
    """The sums of one kind of round: of contributions, and of changes of the model's state.

    Args:
        place: of this process.
        mesh: of its device.
        turn: which round it is.
        like: of the shapes of what a worker's sums are.
        kind: a number of its own.
    """

    meet_before = True

    def __init__(
        self,
        place: place_lib.Place,
        mesh: Mesh,
        turn: halves.Turn,
        like: types.PyTree,
        kind: int,
    ) -> None:
        self._place, self._mesh, self._turn, self._like = place, mesh, turn, like
        self._kind = kind
        self._of_members: dict[Member, tuple[halves.Halves, halves.Halves]] = {}
        self._size = 0  # numbers of a contribution; 0: none is known
        self._dtype = np.dtype(np.float32)

    def post(self, contributed: types.Contribution) -> None:
        added = contributed.sums, contributed.state_change
        mine = jax.tree.leaves(mesh_lib.worker_rows(added)[0])
        numbers = [np.asarray(leaf).reshape(-1) for leaf in mine]
        if not self._size:
            self._dtype = np.result_type(*numbers)
            self._size = sum(part.size for part in numbers)
            # Aligned, so that JAX reads it where it lies.
            row = -(-self._num_bytes // halves.ALIGNED) * halves.ALIGNED
            rows = np.frombuffer(mmap.mmap(-1, 2 * row), np.uint8).reshape(2, row)
            self._totals = [self._vector(half) for half in rows]
        if self._turn.is_warm_up:
            np.concatenate(numbers, out=self._totals[self._turn.number % 2])
            return
        own, _ = self._buffers(self._place.own)
        np.concatenate(numbers, out=self._vector(own.begin(self._turn.number)))
        own.end(self._turn.number)

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        total = self._totals[self._turn.number % 2]
        if not self._turn.is_warm_up:
            self._add(total)
            self._turn.number += 1
        size = sum(leaf.size for leaf in jax.tree.leaves(self._like))
        change, treedef = jax.tree.flatten(contributed.state_change)
        cuts = np.cumsum([size, *(leaf.size for leaf in change)])
        parts = [
            part.reshape(leaf.shape).astype(leaf.dtype)
            for part, leaf in zip(np.split(total, cuts)[1:-1], change, strict=True)
        ]
        sums, change = mesh_lib.place((total[None, :size], parts), self._mesh)
        return contributed._replace(sums=sums, state_change=jax.tree.unflatten(treedef, change))

    def totals(
        self, contributed: types.Contribution, metrics: types.SyncMetrics
    ) -> tuple[types.PyTree, jax.Array]:
        return shared_sums.opened(contributed.sums, self._like), metrics.weight_sum

    @property
    def _num_bytes(self) -> int:
        return self._size * self._dtype.itemsize

    def _vector(self, half: np.ndarray) -> np.ndarray:
        return half[: self._num_bytes].view(self._dtype)

    def _buffers(self, member: Member) -> tuple[halves.Halves, halves.Halves]:
        """What a member contributes, and the slices that it has added."""
        if member not in self._of_members:
            names = [f"sums-{self._kind}-{what}" for what in ("own", "added")]
            if member == self._place.own:
                own, added = (halves.made(self._place, name, self._num_bytes) for name in names)
            else:
                paths = [self._place.directory / f"{name}.{member.start}" for name in names]
                own, added = (halves.Halves(path, self._num_bytes) for path in paths)
            self._of_members[member] = own, added
        return self._of_members[member]

    def _add(self, total: np.ndarray) -> None:
        """Makes `total` the sum of all contributions that the decision names."""
        place, number = self._place, self._turn.number
        assert place.last is not None
        members = place.last.sum
        rows = [self._vector(self._buffers(m)[0].halves[number % 2]) for m in members]
        cuts = np.linspace(0, self._size, len(members) + 1).astype(int)
        slices = {m: slice(*cuts[k : k + 2]) for k, m in enumerate(members)}
        mine, (_, shown) = slices[place.own], self._buffers(place.own)
        own = self._vector(shown.begin(number))[mine]
        shared_sums.add_up([row[mine] for row in rows], own)
        total[mine] = own
        shown.end(number)
        place.wake(members)
        for member in (m for m in members if m != place.own):
            part, theirs = slices[member], self._buffers(member)[1]
            self._wait_for(member, theirs)
            total[part] = self._vector(theirs.halves[number % 2])[part]
            if not theirs.has(number):  # it is dead or late, or this process has slept
                shared_sums.add_up([row[part] for row in rows], total[part])
        if not all(self._buffers(member)[0].has(number) for member in members):
            place.leave(place.newest() or place.last)
        for gone in self._of_members.keys() - {*members, *place.last.members}:
            del self._of_members[gone]

    def _wait_for(self, member: Member, theirs: halves.Halves) -> None:
        """Until a member has added its slice, unless it is dead or late."""
        place, since = self._place, time.monotonic()
        with waits.Wait("add up its part of the sums", lambda: [member.seat]) as wait:
            while not theirs.has(self._turn.number) and place.lives(member):
                wait.check()
                now = time.monotonic()
                if now - since > place.late_secs and not place.is_busy(member, now):
                    return
                place.wait(place_lib.LOOK_SECS)
