"""Processes that come and go: a referee decides, a carrier moves what it decides on.

A round of theirs (`comm/referee.py`):

1. Each member puts up what its worker contributes (`post`), and tells that it is ready, with what
   all are to know of its work (`allgather`).
2. It takes the contributions of all members, adds them in the order of the ranks, and tells that it
   has the sum. Where another dies meanwhile, it hears of another attempt without that one.
3. When all that live have the sum, the round is decided: each goes on with it (`total`).

On one machine, where contributions outlive their members, 3 comes before 2.

A newcomer is handed the state in which a round begins. It takes the sum of that round as the others
do, and computes from the next round on.
"""

import logging
import signal
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax import types, wires
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import membership as membership_lib
from hetjax.comm import referee, referee_host, shared_sums
from hetjax.comm.views import Member, MembershipView
from hetjax.liveness import blocking_waits

logger = logging.getLogger(__name__)


class Elastic(communicator_lib.Communicator):
    """A member of a run over machines, which has one worker.

    Args:
        roster: of this process.
        mesh: of its device.

    Raises:
        ValueError: this process has taken part in a run.
    """

    alone = has_collectives = False
    no_collectives = "the processes of this run come and go (--runtime=apart, or elastic). "
    carries_more = True

    def __init__(self, roster: membership_lib.MembershipClient, mesh: Mesh) -> None:
        if roster.is_taken:
            raise ValueError(
                "a process of a run apart trains once: put a second fit into a script of its own"
            )
        roster.is_taken = True
        super().__init__(roster.num_processes)
        self.roster, self.mesh = roster, mesh
        self.incarnation, self.run_id = roster.incarnation, roster.run_id
        self.process_of = np.arange(roster.num_processes)
        self.is_warm_up = True
        self._point: types.PyTree = None
        self._sums: list[shared_sums.ElasticSums] = []  # of each kind of rounds
        self._handed: Any = None  # the state that lies there for newcomers
        # Of those whose states have to be the same to the bit.
        self._line = f"{mesh.devices.flat[0].device_kind}{mesh.shape}"

    @property
    def present(self) -> np.ndarray:
        return np.isin(self.process_of, [m.rank for m in self.roster.members])

    @property
    def joins(self) -> bool:
        return self.roster.is_guest

    def begins(self, round_index: int | None, point: types.PyTree) -> None:
        self.is_warm_up, self._point = round_index is None, point
        own = -1 - self.roster.incarnation  # each warms up for itself
        self.round_number = own if round_index is None else round_index

    def start_barrier(self, state: types.PyTree = ()) -> None:
        """Waits until all founders that live are there; they begin the run together.

        Raises:
            ValueError: the run has begun without this process, or lacks memory.
        """
        roster = self.roster
        if roster.last is not None:
            return
        if self.joins:
            raise ValueError("fit: only fit takes newcomers into an elastic run; Run has no way to")
        handed = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))
        sums = sum(each.num_bytes for each in self._sums)
        roster.carrier.check_room(sums, handed, roster.num_processes)
        before = state.rounds_done - 1
        event = ("begins", roster.own, before)
        with blocking_waits.Wait("begin", roster.others) as wait:
            while (order := roster.call(before, event)).kind not in ("apply", "add"):
                wait.check()
        roster.last = view = order.what if order.kind == "apply" else order.what[0]
        if view.changes and roster.leads:
            who = ", ".join(str(member.rank) for member, _ in view.changes)
            logger.warning(f"the run begins without worker {who}: it has ended before")

    # --- A round ---

    def allgather(self, messages: np.ndarray) -> np.ndarray:
        roster = self.roster
        if self.is_warm_up:
            return self._spread(messages, {roster.own: messages.tobytes()})
        view = self._decided(messages)
        heard = dict(zip(view.sum, view.told, strict=True))
        self._check(heard)
        self._tell_changes(view)
        roster.last, self.changes = view, [(m.rank, how) for m, how in view.changes]
        self._handed = None
        roster.carrier.let_go()
        return self._spread(messages, {m: told.message for m, told in heard.items()})

    def _spread(self, like: np.ndarray, rows: dict[Member, bytes]) -> np.ndarray:
        """[W], zeros of the members that have told nothing."""
        heard = self.responded = np.zeros(len(self.process_of), bool)
        spread = np.zeros(len(self.process_of), like.dtype)
        for member, row in rows.items():
            spread[member.rank], heard[member.rank] = np.frombuffer(row, like.dtype)[0], True
        return spread

    def _decided(self, messages: np.ndarray) -> MembershipView:
        """Takes part in a round until it is decided."""
        roster, number = self.roster, self.round_number
        (sums,) = (each for each in self._sums if each.is_posted)
        event: tuple[Any, ...] | None = None
        if roster.own in roster.members:  # else it has just got the state
            line = zlib.crc32(self._line.encode())
            told = referee_host.Told(messages.tobytes(), line, digest(self._point))
            event = ("ready", roster.own, number, told, sums.put(), sums.cost(messages))
        failed: tuple[int, int] | None = None
        with blocking_waits.Wait("end the round", roster.others) as wait:
            while (order := roster.call(number, event, failed=failed)).kind != "apply":
                wait.check()
                event = failed = None
                if order.kind == "over":  # a newcomer cannot know that the last round is done
                    roster.end_over()
                elif order.kind in ("take", "gather"):
                    attempt, members, *_, where = order.what
                    do = sums.gather if order.kind == "gather" else sums.add
                    if (done := do(members, where, (number, attempt))) is None:
                        failed = number, attempt
                    else:
                        event = (done[0], roster.own, number, attempt, *done[1:])
                elif order.kind in ("add", "read"):
                    view, where, *for_all = order.what
                    if order.kind == "read":
                        done = sums.read(where, (number, 0))
                    else:
                        done = sums.add(view.sum, where, (number, 0), for_all=any(for_all))
                    if any(for_all) and done is not None:
                        event = ("summed", roster.own, number, sums.put_sum())
                    roster.call(number, event, waits=False)  # or it may be another round's
                    if done is not None:
                        return view
        return order.what

    def _check(self, heard: dict[Member, referee_host.Told]) -> None:
        """Compares the digests of what the members made of the round before, in a line.

        Raises:
            RuntimeError: they have different states.
        """
        first: dict[int, tuple[int, int]] = {}
        for member, told in heard.items():
            rank, found = first.setdefault(told.line, (member.rank, told.digest))
            if found != told.digest:
                raise RuntimeError(
                    f"worker {member.rank} has another state than worker {rank} after round "
                    f"{self.round_number - 1}"
                )

    def _tell_changes(self, view: MembershipView) -> None:
        if view.members[:1] != (self.roster.own,):
            return
        counted = {member.rank for member in view.sum}
        for member, what in view.changes:
            did = "what it did counts" if member.rank in counted else "the others do its part"
            text = f"{view.round_index}: worker {member.rank} {what}; {did}"
            if what == referee.JOINED:
                text = f"{view.round_index + 1}: worker {member.rank} joins"
            logger.info(f"round {text}")

    def sums(
        self, like: types.PyTree, wire: str = wires.FLOAT32, layout: mesh_lib.Layout | None = None
    ) -> communicator_lib.Sums:
        self._sums.append(shared_sums.ElasticSums(self.roster, self.mesh, like, layout, wire))
        return self._sums[-1]

    # --- Coming and going ---

    def sends_state(self) -> bool:
        last = self.roster.last
        return last is not None and bool(last.joining) and last.members[0] == self.roster.own

    def send_state(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        roster, last = self.roster, self.roster.last
        assert last is not None
        pieces = {
            name: (roster.put(np.asarray(array)), str(array.dtype), array.shape)
            for name, array in arrays.items()
        }
        self._handed = about, pieces, last, self._line
        roster.call(None, ("donated", roster.own, last.round_index + 1, self._handed), waits=False)

    def receive_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Waits until this newcomer, which has compiled, is handed the state of a round."""
        roster = self.roster
        event: tuple[Any, ...] | None = ("joins", roster.own)
        failed: tuple[int, int] | None = None
        found = None
        with blocking_waits.Wait("take it in", roster.others) as wait:
            while (order := roster.call(None, event, failed=failed)).kind != "held":
                wait.check()
                event = failed = None
                if order.kind == "over":
                    roster.end_over()
                elif order.kind == "lack":
                    event = ("lacks", roster.own, order.what)
                elif order.kind == "receive":
                    number, (about, pieces, view, line) = order.what
                    if (found := self._taken(pieces, (number, 0))) is None:
                        failed = number, 0
                    else:
                        event = ("holds", roster.own, number)
        assert found is not None
        roster.last = view
        if not line.endswith(self._line):  # of other devices, which round in another way
            line = f"{zlib.crc32(line.encode())} {view.round_index} {self._line}"
        self._line = line
        return found, about

    def _taken(self, pieces: dict[str, Any], over: tuple[int, int]) -> dict[str, np.ndarray] | None:
        found = {}
        for name, (handle, kind, shape) in pieces.items():
            if (taken := self.roster.take([handle], over)) is None:
                return None
            found[name] = taken[0].view(jnp.dtype(kind)).reshape(shape).copy()
        return found

    def keep(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        self.roster.ask("keep", (arrays, about))

    def kept(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        return self.roster.ask("kept")

    def outlives_leader(self) -> bool:
        roster = self.roster
        with blocking_waits.Wait("write what the run leaves", roster.others) as wait:
            while roster.call(None, ("ends", roster.own)).kind != "over":
                if roster.leads:
                    return True
                wait.check()
        return False

    def leaves_by(self, number: signal.Signals) -> bool:
        if number != signal.SIGTERM or not self.roster.others():
            return False
        self.roster.ask_to_leave()
        return True

    def close(self) -> None:
        if self.roster.leads:
            self.roster.call(None, ("finished", self.roster.own), waits=False)


def digest(tree: types.PyTree) -> int:
    """Of the bytes of all leaves: their sums as 64-bit integers."""
    found = np.int64(0)
    with np.errstate(over="ignore"):
        for leaf in jax.tree.leaves(mesh_lib.worker_rows(tree)[0]):
            content = np.asarray(leaf).reshape(-1).view(np.uint8)
            whole = content[: content.size // 8 * 8].view(np.int64)
            found = found * np.int64(31) + whole.sum() + content[whole.nbytes :].sum(dtype=np.int64)
    return int(found)
