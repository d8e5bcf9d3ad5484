"""Adds up what the workers contribute in memory that the processes of one machine share.

Sums through sockets, as in a cluster, cost every process much of its processor time, and the round
waits for the process with the least. So every process copies its own contribution into a file that
all have mapped, before the gathering at the end of the local phase (`allgather_work`). Afterwards
the process whose time is the cheapest adds them up there, in the order of the workers. Rounds use
two places of the file in turn, so a process that is ahead overwrites nothing.

Where the processes are on several machines, each machine has such a file, and its first process
adds the totals of the machines up over the network.

Where processes come and go (`elastic`), each takes what the others have put up, and adds it up
itself, or a slice of it, or one does for all.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import memory, trees, types, wires
from hetjax import mesh as mesh_lib
from hetjax.comm import communicator, membership, socket_allgather
from hetjax.comm.views import Member

WHOLE_BYTES = 1 << 20  # where processes come and go, a sum of more is added in slices
_PIECES, _MOST_BYTES_OF_PIECE = 8, 32 << 20  # at least, of what is added in slices; of a piece
_MOST_BYTES = 1 << 30  # of the file: larger sums are left to the sockets
_ALIGNED = 64  # bytes; JAX copies what is not aligned so
_BLOCK = 1 << 15  # numbers that are added up at a time, in the cache


class HostSums(communicator.Sums):
    """Sums that the host has added up before the sync phase begins, in one vector.

    Args:
        mesh: the worker mesh.
        like: a pytree of the shapes of what a worker contributes.
        layout: of the arrays on each worker's slice, if it has one: they are put there leaf by
            leaf, and else as one vector.
    """

    meet_before = True

    def __init__(self, mesh: Mesh, like: types.PyTree, layout: mesh_lib.Layout | None) -> None:
        self._mesh, self._layout = mesh, layout
        self._like = like  # of the shapes of what a worker contributes

    def totals(self, contributed: types.Contribution) -> types.PyTree:
        if self._layout is not None:
            return contributed.sums
        return trees.of_vector(contributed.sums, self._like)

    def _placed(self, vector: np.ndarray) -> types.PyTree:
        """The numbers, on each worker: a vector, or as its slice has them."""
        row = vector if self._layout is None else trees.of_vector(vector, self._like)
        count = self._mesh.shape[mesh_lib.WORKER_AXIS]
        rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (count, *leaf.shape)), row)
        return mesh_lib.place(rows, self._mesh, self._layout)


class SharedSums(HostSums):
    """The sums by way of the file, as one process has it; see above.

    Args:
        file: open in this process, of `new_file`. It is closed here.
        mesh: the worker mesh.
        like, layout: as of `HostSums`; all of one type.
        sockets: to the other processes of this machine.
        across: makes a machine's total that of all machines, where there are several.
    """

    def __init__(
        self,
        file: int,
        mesh: Mesh,
        like: types.PyTree,
        layout: mesh_lib.Layout | None,
        sockets: socket_allgather.SocketAllGather,
        across: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        super().__init__(mesh, like, layout)
        self._sockets, self._across = sockets, across
        self._workers = mesh_lib.own_workers(mesh)
        self._of_machine = _of_machine(mesh, sockets)
        (dtype,) = {leaf.dtype for leaf in jax.tree.leaves(like)}
        size = sum(leaf.size for leaf in jax.tree.leaves(like))
        num_rows = len(self._of_machine)
        try:
            mapped = mmap.mmap(file, _num_bytes(like, num_rows))
        finally:
            os.close(file)
        # For each of two rounds: the workers' rows, and behind them the total.
        places = np.frombuffer(mapped, dtype).reshape(2, num_rows + 1, -1)[:, :, :size]
        self._rounds = [(place[:-1], place[-1]) for place in places]

    def post(self, contributed: types.Contribution) -> None:
        self._rounds.reverse()
        for worker, row in zip(self._workers, mesh_lib.worker_rows(contributed.sums), strict=True):
            parts = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(row)]
            np.concatenate(parts, out=self._rounds[0][0][self._of_machine.index(worker)])

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        """With `sums` `[W, P]`: each worker has the total, its leaves one after the other.

        JAX reads it where it lies, in the file. The process that needed the least time between its
        last two local phases adds up, since its time is the cheapest. While that is not known (all
        `host_secs` are 0), process 0 does, and of several machines the first process of each. The
        others wait for it.

        Raises:
            LostProcessError: a process has ended.
        """
        rows, total = self._rounds[0]
        process = self._sockets.processes[0]
        if self._across is None:
            cheapest = self._of_machine[int(np.argmin(host_secs[self._of_machine]))]
            process = mesh_lib.worker_devices(self._mesh)[cheapest].process_index
        if process == jax.process_index():
            add_up(list(rows), total)
            if self._across is not None:
                self._across(total)
        self._sockets.follow(process)
        return contributed._replace(sums=self._placed(total))


class ElasticSums(HostSums):
    """The sums of one kind of round of a process that has one worker, where processes come and go:
    its contribution and its change of the model's state are one vector.

    Args:
        roster: of this process.
        mesh: of its device.
        like, layout: as of `HostSums`.
        wire: of these, one of `wires.WIRES`; a wire of fewer bytes has them in float32.
    """

    def __init__(
        self,
        roster: membership.MembershipClient,
        mesh: Mesh,
        like: types.PyTree,
        layout: mesh_lib.Layout | None = None,
        wire: str = wires.FLOAT32,
    ) -> None:
        super().__init__(mesh, like, layout)
        self._roster, self._wire = roster, wire
        self._is_plain = wire == wires.FLOAT32
        self._size = sum(leaf.size for leaf in jax.tree.leaves(like))  # numbers of a contribution
        self._own = np.zeros(self._size, np.float32)  # what this process contributes
        self._sum = self._own  # of all, once it is there; while a round warms up, of this one
        self.is_posted = False  # for the round that goes on
        self._totals: list[np.ndarray] = []  # of two rounds in turn: JAX reads one where it lies

    @property
    def num_bytes(self) -> int:
        """Of a contribution; with the changes of the model's state, once one has been posted."""
        return self._own.nbytes

    def copies(self, present: int) -> tuple[float, float]:
        if len(self._parts) > 1 or self._roster.carrier.outlives:
            return super().copies(present)
        return present * (present - 1), 0  # each takes those of all others

    def post(self, contributed: types.Contribution) -> None:
        added = contributed.sums, contributed.state_change
        mine = jax.tree.leaves(mesh_lib.worker_rows(added)[0])
        numbers = [np.asarray(leaf).reshape(-1) for leaf in mine]
        size, dtype = sum(part.size for part in numbers), np.result_type(*numbers)
        self._own = self._room(size, dtype) if self._is_plain else np.empty(size, dtype)
        np.concatenate(numbers, out=self._own)
        self._sum, self.is_posted = self._own, True
        if not self._totals or self._totals[0].size != self._own.size:
            self._totals = [self._new_vector(), self._new_vector()]
        self._totals.reverse()

    def _room(self, size: int, dtype: np.dtype) -> np.ndarray:
        """For what is put up next, which then is not copied."""
        return self._roster.carrier.room(size * dtype.itemsize).view(dtype)

    def _new_vector(self) -> np.ndarray:
        """Of this process only; aligned, so that JAX reads it where it lies."""
        return np.frombuffer(mmap.mmap(-1, self.num_bytes), self._own.dtype)

    @property
    def _parts(self) -> list[slice]:
        """The pieces of a vector. One of several is added in slices, of whole pieces."""
        size, most = self._own.size, _MOST_BYTES_OF_PIECE // self._own.itemsize
        is_whole = self.num_bytes <= WHOLE_BYTES or self._roster.carrier.outlives
        count = 1 if is_whole else max(_PIECES, -(-size // most))
        unit = 1 if self._is_plain else wires.BLOCK
        ends = [*(size * k // count // unit * unit for k in range(count)), size]
        return list(map(slice, ends[:-1], ends[1:]))

    def cost(self, messages: np.ndarray) -> float | None:
        """Of the time of this process, where one adds for all; None: each adds a small sum. While
        it is not known it is infinite."""
        return None if self.num_bytes <= WHOLE_BYTES else float(messages["host_secs"][0]) or np.inf

    def put(self) -> list[Any]:
        """Puts up what was posted, in pieces."""
        return [self._roster.put(self._sent(part)) for part in self._parts]

    def _sent(self, part: slice) -> np.ndarray:
        """What goes over the wire of a piece: of the model's state all bytes."""
        if self._is_plain:
            return self._own[part]
        end = max(part.start, min(part.stop, self._size))
        sums, state = self._own[part.start : end], self._own[end : part.stop]
        return np.concatenate([wires.packed(sums, self._wire), state.view(np.uint8)])

    def _arrived(self, sent: np.ndarray, part: slice) -> np.ndarray:
        """The numbers of such a piece of another member."""
        if self._is_plain:
            return sent.view(self._own.dtype)
        count = max(min(part.stop, self._size) - part.start, 0)
        cut = wires.num_bytes(count, self._wire)
        sums, dtype = wires.unpacked(sent[:cut], count, self._wire), self._own.dtype
        return np.concatenate([sums.astype(dtype), sent[cut:].view(dtype)])

    def put_sum(self) -> Any:
        return self._roster.put(self._sum)

    def read(self, put: Any, over: tuple[int, int]) -> tuple[Any, ...] | None:
        """Takes the sum of another member; None: it was not there."""
        if (taken := self._roster.take([put], over)) is None:
            return None
        self._sum = taken[0].view(self._own.dtype)
        return ("read",)

    def add(
        self,
        members: Sequence[Member],
        put: Sequence[list[Any]],
        over: tuple[int, int],
        *,
        for_all: bool = False,
    ) -> tuple[Any, ...] | None:
        """Adds up what the members have put up, in their order: all of it, or this one's slice.

        Args:
            members: of the sum.
            put: by each of them.
            over: (round, attempt).
            for_all: whether the others read what this one adds.

        Returns:
            What to tell: `("has",)`, or `("added", slice)`; None where something was not there.
        """
        parts, own = self._parts, self._roster.own
        self._sum = self._room(self._own.size, self._own.dtype) if for_all else self._totals[0]
        total = self._sum
        if not members:  # newcomers alone have the state
            total[:] = 0
        mine = range(1) if len(parts) == 1 else _slice(own, members, len(parts))
        for number in mine if members else ():
            others = [p[number] for m, p in zip(members, put, strict=True) if m != own]
            if (taken := self._roster.take(others, over)) is None:
                return None
            found, part = iter(taken), parts[number]
            rows = [
                self._own[part] if m == own else self._arrived(next(found), part) for m in members
            ]
            add_up(rows, total[part])
        if len(parts) == 1:
            return ("has",)
        slices = [self._roster.put(total[parts[k]]) for k in mine]
        return "added", slices if own in members else None

    def gather(
        self, members: Sequence[Member], put: Sequence[list[Any]], over: tuple[int, int]
    ) -> tuple[Any, ...] | None:
        """Takes the slices of the others, the next one's first, so that not all ask the same one at
        once; the arguments and what is returned are as of `add`."""
        parts, own = self._parts, self._roster.own
        pairs = sorted(zip(members, put, strict=True), key=lambda pair: pair[0].rank <= own.rank)
        for member, pieces in pairs:
            if member != own:
                for number, piece in zip(_slice(member, members, len(parts)), pieces, strict=True):
                    if (taken := self._roster.take([piece], over)) is None:
                        return None
                    np.copyto(self._sum[parts[number]], taken[0].view(self._sum.dtype))
        return ("has",)

    def total(self, contributed: types.Contribution, host_secs: np.ndarray) -> types.Contribution:
        """The contribution with the sums that the vector holds."""
        self.is_posted = False
        like = contributed.state_change
        change = trees.of_vector(self._sum[self._size :], like)
        change = jax.tree.map(lambda part, leaf: part.astype(leaf.dtype), change, like)
        change = mesh_lib.place(change, self._mesh, self._layout)
        return contributed._replace(sums=self._placed(self._sum[: self._size]), state_change=change)


def _slice(member: Member, members: Sequence[Member], count: int) -> range:
    """Which of so many pieces a member adds; none of one that is not in the sum."""
    if member not in members:
        return range(0)
    at, of = members.index(member), len(members)
    return range(count * at // of, count * (at + 1) // of)


def _of_machine(mesh: Mesh, sockets: socket_allgather.SocketAllGather) -> list[int]:
    """The workers of this machine, in order."""
    processes = set(sockets.processes)
    firsts = mesh_lib.worker_devices(mesh)
    return [w for w, device in enumerate(firsts) if device.process_index in processes]


def add_up(rows: Sequence[np.ndarray], total: np.ndarray) -> None:
    """Makes `total` the sum of the rows, one after the other."""
    for start in range(0, total.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        part = total[block]
        np.copyto(part, rows[0][block])
        for row in rows[1:]:
            part += row[block]


def _num_bytes(like: types.PyTree, num_workers: int) -> int:
    return 2 * (num_workers + 1) * -(-trees.num_bytes(like) // _ALIGNED) * _ALIGNED


def new_file(num_bytes: int) -> int | None:
    """A file in memory that has no name, so that nothing of it stays; None: there is no room.

    It does not lie in `/dev/shm`, which is small in many containers.
    """
    free = memory.free_bytes()  # more would not fail: the system would kill a process
    if not hasattr(os, "memfd_create") or (free is not None and num_bytes > free // 2):
        return None
    file = os.memfd_create("hetjax-sums")
    try:
        os.posix_fallocate(file, 0, num_bytes)  # without it, no room would be SIGBUS later
    except OSError:
        os.close(file)
        return None
    return file


def file_of_machine(
    mesh: Mesh, like: types.PyTree, sockets: socket_allgather.SocketAllGather
) -> int | None:
    """A file in memory for the sums, which the first process of a machine hands out to the others.

    Args:
        mesh: the worker mesh.
        like: a pytree of the shapes and types of what a worker contributes.
        sockets: between the processes of this machine.

    Returns:
        The file, open in this process; None in all processes where the sums do not fit into one,
        and are left to the collectives.

    Raises:
        LostProcessError: a process has ended.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(like)}
    num_bytes = _num_bytes(like, len(_of_machine(mesh, sockets)))
    are_known = dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}
    if len(dtypes) > 1 or not are_known or not 0 < num_bytes <= _MOST_BYTES:
        return None
    first = sockets.processes[0]
    if jax.process_index() != first:
        return sockets.take(first)
    file = new_file(num_bytes)
    sockets.hand_out(file)
    return file
