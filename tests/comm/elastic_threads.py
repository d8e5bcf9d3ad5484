"""An elastic run in one process: its members are threads, and the loop of the host is one more.

A member's contribution is drawn by its incarnation and the round. Its state is the sum of all
totals. What each was told, took and became is told to `Run.told`.
"""

import asyncio
import collections
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types, wires
from hetjax.comm import carrier, elastic, membership, referee_host
from hetjax.comm.referee import Member

LIKE = {"w": jnp.zeros((5, 4)), "b": jnp.zeros(3)}
SIZE, STATES = 23, 2  # numbers of a contribution; of a change of the model's state
MESSAGE = np.dtype([("of", np.int64), ("ends", np.int64), ("host_secs", np.float64)])


class DeadError(SystemExit):
    """A member has died, so its thread ends."""


class Fault(NamedTuple):
    """What happens once to a member, around a call of a round: `kind` is of `call`'s event, or the
    method; "take": while another takes the second piece of its contribution."""

    does: str  # dies, or loses the answer
    when: str  # before, after
    kind: str
    round: int | None = None  # any
    behind: tuple[Member, str] | None = None  # what another tells before


class Begun(NamedTuple):
    rounds_done: int
    state: Any = ()


class Run:
    """The host, and what the members have put up.

    Args:
        founders: how many members begin it.
        faults: of some members.
        outlives: whether what members put up outlives them.
        wire: of what they put up.
    """

    def __init__(
        self,
        founders: int,
        faults: dict[Member, Fault],
        *,
        outlives: bool = False,
        wire: str = wires.FLOAT32,
    ) -> None:
        self.outlives, self.wire = outlives, wire
        self.founders = [Member(rank, rank) for rank in range(founders)]
        self.faults, self.happened = faults, set()
        self.heard: dict[tuple[Member, str], threading.Event] = collections.defaultdict(
            threading.Event
        )
        self.host = referee_host.RefereeHost(60.0, 60.0, outlives=outlives)
        self.put: dict[tuple[Member, int], np.ndarray] = {}
        self.dead, self.is_over = set(), False
        self.told: dict[Member, dict[int, Any]] = {}  # member, round: (view, total)
        self.states: dict[Member, np.ndarray] = {}
        self.ends_at, self.errs = 10**6, None  # who has another state after its first round
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def ask(self, method: str, *args: Any) -> Any:
        call = getattr(self.host, method)(*args)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    def kill(self, member: Member) -> None:
        """What it has put up is gone at once; the referee hears it after a while."""
        self.dead.add(member)

        async def hear() -> None:
            await asyncio.sleep(0.1)
            await self.host.gone(member, "was killed")

        asyncio.run_coroutine_threadsafe(hear(), self._loop)

    def close(self) -> None:
        """Ends the threads, which would beat for ever."""
        self.is_over = True
        for thread in threading.enumerate():
            if thread.name == "hetjax-beat":
                thread.join()

        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def contribution(self, member: Member, number: int) -> np.ndarray:
        rng = np.random.default_rng((member.incarnation, number))
        numbers = rng.standard_normal(SIZE + STATES).astype(np.float32)
        if self.wire != wires.FLOAT32:
            numbers[:SIZE] = wires.rounded(jnp.asarray(numbers[:SIZE]), self.wire)
        return numbers

    def oracle(self, members: tuple[Member, ...], number: int) -> np.ndarray:
        total = np.zeros(SIZE + STATES, np.float32)
        for index, member in enumerate(members):
            row = self.contribution(member, number)
            total = row if index == 0 else total + row
        return total


class Carrier(carrier.Carrier):
    """As `comm.carrier` has it.

    Args:
        run: of the member.
        own: the member.
    """

    shares_gpus, lost_secs = False, 60.0

    def __init__(self, run: Run, own: Member) -> None:
        self.run, self.own, self.round = run, own, -1
        self.outlives = run.outlives
        self.number = 0  # of what it puts up

    def call(self, method: str, *args: Any) -> Any:
        event = args[2] if method == "call" else None
        kind = event[0] if event else method
        if self.outlives and kind in ("summed", "call") and self.round >= 0:
            kind = "has"  # what it tells of a sum, or that it is there yet
        self._happens("before", kind)
        answer = self.run.ask(method, *args)
        self.run.heard[self.own, kind].set()
        self._happens("after", kind)
        return answer

    def _happens(self, when: str, kind: str) -> None:
        fault = self.run.faults.get(self.own)
        is_there = fault and (when, kind) == fault[1:3] and fault.round in (None, self.round)
        if is_there and self.own not in self.run.happened:
            self.run.happened.add(self.own)
            if fault.behind:
                assert self.run.heard[fault.behind].wait(60)
            if fault.does == "loses":
                raise carrier.LostRefereeError("lost", is_final=False)
            self.run.kill(self.own)
        if self.own in self.run.dead or self.run.is_over:
            raise DeadError(self.own)

    def let_go(self) -> None:
        """What others may read yet stays: a member may hear of the decision later."""

    def check_room(self, sums: int, state: int, members: int) -> None:
        """There is."""

    def put(self, piece: np.ndarray) -> Any:
        self.number += 1
        self.run.put[self.own, self.number] = piece.copy()
        return self.own, self.number

    def take(self, handles: Any, over: Any, moved: Any) -> list[np.ndarray] | None:
        for giver, _ in handles:
            fault = self.run.faults.get(giver)
            if fault and fault[2:4] == ("take", over[0]) and giver not in self.run.happened:
                self.run.happened.add(giver)
                self.run.kill(giver)
        if not self.outlives and any(giver in self.run.dead for giver, _ in handles):
            return None
        taken = [self.run.put[handle].copy() for handle in handles]
        moved(sum(piece.nbytes for piece in taken))
        return taken


def contributed(numbers: np.ndarray, mesh: Any) -> types.Contribution:
    row, one, none = numbers[None], np.ones(1, np.float32), np.zeros(1, np.int32)
    sums = {"b": row[:, :3], "w": row[:, 3:SIZE].reshape(1, 5, 4)}
    tally, change = types.Tally(none, none, none), {"mean": row[:, SIZE:]}
    made = types.Contribution(sums, one, one, (), (), tally, state_change=change)
    return mesh_lib.place(made, mesh)


def _flat(found: types.Contribution) -> np.ndarray:
    return np.concatenate([np.asarray(found.sums)[0], np.asarray(found.state_change["mean"])[0]])


def train(run: Run, own: Member, seats: int = 4) -> None:
    """What a member does, until one asks for the end."""
    own_carrier = Carrier(run, own)
    roster = membership.MembershipClient(own_carrier, own, seats=seats)
    mesh = mesh_lib.make_worker_mesh(1)
    member = elastic.Elastic(roster, mesh)
    sums, other = (member.sums(LIKE, run.wire) for _ in range(2))  # of two kinds of rounds
    rounds, state = run.told.setdefault(own, {}), np.zeros(SIZE + STATES, np.float32)

    def round_of(number: int | None, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kind = other if number == 2 else sums
        member.begins(number, jnp.asarray(state))
        kind.post(given := contributed(numbers, mesh))
        ends = number is not None and number >= run.ends_at
        heard = member.allgather(np.array([(own.incarnation, ends, 1.0 + own.rank)], MESSAGE))
        return heard, _flat(kind.total(given, np.zeros(seats)))

    numbers = run.contribution(own, 0)
    heard, total = round_of(None, numbers)
    assert heard["of"].sum() == own.incarnation
    np.testing.assert_array_equal(total, numbers)
    number = 0
    if member.joins:
        arrays, about = member.receive_state()
        state, number = arrays["state"], about["rounds"]
        assert (arrays["half"].dtype, arrays["none"].shape) == (jnp.bfloat16, (0, 2))
    else:
        member.start_barrier(Begun(0))
    while not heard["ends"].any():
        own_carrier.round = number
        numbers = run.contribution(own, number) * np.float32(member.present[own.rank])
        heard, total = round_of(number, numbers)
        rounds[number] = roster.last, total, heard, member.changes
        state, number = state + total + np.float32(own == run.errs), number + 1
        if member.sends_state():
            arrays = {"state": state, "half": jnp.ones(3, jnp.bfloat16), "none": np.zeros((0, 2))}
            member.send_state(arrays, {"rounds": number})
    run.states[own] = state
    if roster.leads:
        member.keep({"best": state}, {"by": own.rank})
    elif member.outlives_leader():
        assert member.kept() is not None
    member.close()
