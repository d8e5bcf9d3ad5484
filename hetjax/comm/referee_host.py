"""Hosts the referee of a run: holds its state, answers the members, sees who is late.

One object for a run, in a process of its own, whose methods are coroutines of one event loop. A
member's call tells an event and waits for an order, for a short while: an answer that is lost costs
no more. The host's clock alone is read. After the host itself was paused, patience begins anew.
"""

import asyncio
import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hetjax.comm import hosts, referee
from hetjax.comm.views import Member, Order
from hetjax.liveness import heartbeats

_POLL_SECS = 5.0  # that a call waits for another order
_RETRY_SECS = 0.05  # that a member waits which could not take a contribution
_LOOK_SECS = 0.25  # between two looks for who is late
_PAUSED_SECS = 2.0  # between two looks: the host was paused
_ROUNDS = 5  # median rounds in which no member is late
_HEAD_LOOK_SECS, _HEAD_ANSWER_SECS = 2.0, 5.0
_HEAD_STOP_SECS, _HEAD_END_SECS, _HEAD_LAST_SECS = 20.0, 35.0, 40.0  # without the head
RETURNED = "returned"  # a process whose function has ended, which does not come again


class Told(NamedTuple):
    """What a member tells when it is ready."""

    message: bytes  # of its worker
    line: int  # a number of those whose states are the same to the bit
    digest: int  # of the state that it made of the round before


class Beat(NamedTuple):
    """What a member last told of itself."""

    at: float = 0.0  # when it came, by the host's clock
    phase: str = ""
    progress: Any = None  # another with each phase that begins, and each byte that has come
    since: float = 0.0  # when the host first saw this progress


class Answer(NamedTuple):
    """What a member hears: an order, and who is gone."""

    order: Order
    gone: tuple[Member, ...] = ()  # since the last view


class RefereeHost:
    """The referee of a run, and small values that its members share.

    Args:
        late_secs: how long, at least, the others wait for a member that makes no progress.
        busy_secs: how long a member may do work of its own, such as a checkpoint.
        head: HOST:PORT of the engine's own server, without which the run cannot go on for long.
    """

    def __init__(
        self, late_secs: float, busy_secs: float, head: str = "", *, outlives: bool = False
    ) -> None:
        self._late_secs, self._busy_secs, self._head = late_secs, busy_secs, head
        self._outlives = outlives
        self._last_order: Order | None = None  # of all members: the run is to end
        self._state: referee.State | None = None  # None: the run has not begun
        self._first = 0  # the lowest rank of those that begin it
        self._founders: set[Member] = set()
        self._came: dict[Member, int] = {}  # of these: the round before that in which it begins
        self._early: list[tuple[Any, ...]] = []  # events of others, before it has begun
        self._terminated: set[Member] = set()
        self._out: dict[Member, str] = {}  # who is no member any more, and how that came
        self._leaving: set[Member] = set()  # asked to leave, and there still
        self._beats: dict[Member, Beat] = {}
        self._due: dict[Member, float] = {}  # since when a member is waited for
        self._run_id = secrets.token_hex(8)
        self._looked = time.monotonic()
        self._rounds: list[float] = []  # seconds of the last rounds
        self._decided = time.monotonic()  # the last one
        self._changed = asyncio.Event()
        self._values: dict[str, str] = {}
        self._kept: Any = None
        self._tasks: list[asyncio.Task] = []

    async def found(self, founders: list[Member]) -> None:
        """Names the members that begin the run, when all of them that live have come."""
        self._first = min(member.rank for member in founders)
        self._founders = set(founders) - self._out.keys()
        self._tasks = [asyncio.create_task(self._look_for_late())]
        if self._head:
            self._tasks.append(asyncio.create_task(self._look_for_head()))
        self._begin_when_all_came()

    def _begin_when_all_came(self) -> None:
        is_first_there = self._first in {member.rank for member in self._founders}
        if self._state is not None or not is_first_there or not self._founders <= self._came.keys():
            return
        members = sorted(self._founders)
        state = referee.begun(members, self._came[members[0]], outlives=self._outlives)
        there = {m.rank for m in members}
        absent = tuple(each for each in self._out.items() if each[0].rank not in there)
        self._state = state._replace(view=state.view._replace(changes=absent))
        early, self._early = self._early, []
        for event in early:
            self._step(event)
        self._notify()

    def _step(self, event: tuple[Any, ...]) -> None:
        kind, member, *given = event
        if self._state is None:
            if kind == "begins":
                self._came[member] = given[0]
                self._begin_when_all_came()
            else:
                self._early.append(event)
            return
        before = self._state
        if kind != "begins":
            self._state = referee.step(before, event)
        if self._state == before:
            return
        now = time.monotonic()
        if self._state.view != before.view:
            self._rounds = [*self._rounds[-99:], now - self._decided]
            self._decided = now
            self._due = {}
            self._out |= {m: how for m, how in self._state.view.changes if how != referee.JOINED}
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def call(
        self,
        member: Member,
        round_index: int | None,
        event: tuple[Any, ...] | None = None,
        failed: tuple[int, int] | None = None,
        waits: bool = True,
    ) -> Answer:
        """Tells an event, if any, and waits for what a member is to do.

        Args:
            member: that calls.
            round_index: of the round in which it is; None: it has no state yet, or waits for the
                end.
            event: of `referee.step`, or `("begins", member, round_index)`, of a founder: the round
                before that in which the run begins.
            failed: (round, attempt) of which it could not take something.
            waits: for an order.
        """
        if event is not None and member not in self._out:
            self._step(event)
        if failed is not None and failed == self._at:
            await self._until(lambda: failed != self._at, _RETRY_SECS)
        if waits:
            await self._until(lambda: self._order(member, round_index).kind != "wait", _POLL_SECS)
        return self._answer(self._order(member, round_index))

    @property
    def _at(self) -> tuple[int, int]:
        """The round, and the attempt."""
        return (-1, 0) if self._state is None else (self._state.round_index, self._state.attempt)

    async def _until(self, is_true: Callable[[], bool], secs: float) -> bool:
        """Waits for a change after which something is true, for so long; whether it is."""
        ends = time.monotonic() + secs
        while not (done := is_true()) and (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return done

    def _answer(self, order: Order) -> Answer:
        gone = () if self._state is None else tuple(m for m, _ in self._state.gone)
        return Answer(order, gone)

    def _order(self, member: Member, round_index: int | None) -> Order:
        if member in self._out:
            return Order("leave", self._out[member])
        if self._last_order is not None and self._last_order.kind == "ended":
            return self._last_order
        if self._state is None:
            return Order("wait")
        return referee.order(self._state, member, round_index)

    async def changed(self, round_index: int, attempt: int) -> bool:
        """Waits a while for the end of this attempt of a round; whether it has ended."""
        return await self._until(lambda: self._at != (round_index, attempt), _POLL_SECS)

    async def decides(self, rounds: int) -> None:
        """Waits until so many rounds more are decided."""
        last = self._at[0] + rounds
        while not await self._until(lambda: self._at[0] >= last, _POLL_SECS):
            pass

    # --- Who is there ---

    async def beat(
        self, member: Member, phase: str, progress: Any, is_leaving: bool = False
    ) -> Answer:
        """Tells what a member does; it hears who is gone, and whether it is a member itself.

        Args:
            member: that tells.
            phase: as of its heartbeats.
            progress: another value with each phase that begins and each byte that has come.
            is_leaving: whether it is asked to leave after its round.
        """
        now = time.monotonic()
        if is_leaving:
            await self.ask_to_leave(member)
        last = self._beats.get(member, Beat())
        since = last.since if last.progress == progress else now
        self._beats[member] = Beat(now, phase, progress, since)
        if member in self._out:
            return self._answer(self._order(member, None))
        asked = Order("terminate") if member in self._terminated else Order("wait")
        ends = {each.rank: how for each, how in self._out.items()}
        if phase and self._state is None and ends.get(self._first) == RETURNED:
            asked = Order("ended", f"waits for worker {self._first}, which has returned")
        return self._answer(self._last_order or asked)

    async def enter(self, member: Member) -> tuple[tuple[Member, ...], str]:
        """A process has been started; the members that begin the run, by rank, and its name.

        One in the place of the first of them, of whom the others hear where the run begins, begins
        it, too.
        """
        if self._state is None and member.rank == self._first and member not in self._out:
            self._founders.add(member)
        return tuple(sorted(self._founders)), self._run_id

    async def ask_to_leave(self, member: Member) -> None:
        """Has a member leave after its round, as soon as it is one."""
        self._leaving.add(member)

    async def terminate(self, member: Member) -> None:
        """Has a process send itself SIGTERM."""
        self._terminated.add(member)

    async def stop(self, words: str) -> None:
        """Has the members end the run after its round, saved; why, to stand behind "worker 3"."""
        self._end(Order("stop", words))

    def _end(self, order: Order) -> None:
        self._last_order = order
        self._notify()

    async def gone(self, member: Member, how: str) -> tuple[str, bool, str]:
        """Tells that a process has ended; returns how, as the run has it, whether it had become a
        member, and the status, as of `watch`."""
        holders = self._state.holders if self._state else ()
        was_member = member in self._out or member in holders
        return self._leave_out(member, how), was_member, self.status

    def _leave_out(self, member: Member, how: str) -> str:
        if member in self._out:
            return self._out[member]
        if self._state is not None and member in self._state.leaving:
            how = "left"
        self._out[member] = how
        self._founders.discard(member)
        self._step(("gone", member, how))
        self._begin_when_all_came()
        self._notify()
        return how

    async def _look_for_late(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECS)
            now = time.monotonic()
            if now - self._looked > _PAUSED_SECS:
                self._due = {}  # the host was paused: what was told meanwhile is read first
            self._looked = now
            if self._state is None:
                continue
            self._leaving -= self._out.keys()
            for member in self._leaving & set(self._state.present):
                self._step(("asked_to_leave", member))
            waited_for = referee.waited_for(self._state)
            self._due = {m: self._due.get(m, now) for m in waited_for}
            usual = statistics.median(self._rounds) if self._rounds else 0.0
            patience = max(self._late_secs, _ROUNDS * usual)
            for member, due in self._due.items():
                beat = self._beats.get(member, Beat())
                if now - max(due, beat.since) > patience and not self._is_busy(beat, now):
                    self._leave_out(member, "was late")

    async def _look_for_head(self) -> None:
        """Ends the run where the engine's own server has been away for long: saved, if it can be,
        and before the engine ends its processes without a word."""
        host, port = hosts.address_of(self._head)
        secs = 0.0  # without it; a pause of this host is none
        while secs < _HEAD_LAST_SECS:
            began = time.monotonic()
            try:
                opening = asyncio.open_connection(host, port)
                _, writer = await asyncio.wait_for(opening, _HEAD_ANSWER_SECS)
                writer.close()
                secs = 0.0
            except (OSError, TimeoutError):
                took = time.monotonic() - began
                secs += min(max(took, _HEAD_LOOK_SECS), _HEAD_ANSWER_SECS)
            words = f"has lost the head of the cluster, {self._head}: no answer for {secs:.0f} s"
            if secs > _HEAD_END_SECS:
                self._end(Order("ended", words))
            elif secs > _HEAD_STOP_SECS and self._last_order is None:
                self._end(Order("stop", words))
            await asyncio.sleep(max(_HEAD_LOOK_SECS + began - time.monotonic(), 0.0))
        os._exit(1)

    def _is_busy(self, beat: Beat, now: float) -> bool:
        """Whether it does work of its own; before the first round nobody knows how long one is."""
        is_heard = now - beat.at < self._late_secs
        is_own = beat.phase in ("starting", *heartbeats.OWN_WORK) or (
            not self._rounds and beat.phase != "waiting"
        )
        return is_heard and is_own and now - beat.since < self._busy_secs

    async def watch(self, known: int) -> tuple[int, dict[Member, str], str]:
        """For who starts the members: waits until there are more than `known` that are none any
        more. Returns how many there are; who they are, and how that came; and the `status`.
        """
        before = self.status
        await self._until(lambda: len(self._out) > known or self.status != before, _POLL_SECS)
        return len(self._out), dict(self._out), self.status

    @property
    def status(self) -> str:
        """`begins`, `goes`, `over`, or `lost`: nobody has the state."""
        if self._last_order is not None:
            return self._last_order.what
        if self._state is None:
            return "begins"
        if self._state.is_over:
            return "over"
        return "lost" if self._state.is_lost else "goes"

    # --- Small values: methods of JAX's client, which give None where those raise ---

    async def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        if allow_overwrite or key not in self._values:
            self._values[key] = text
            self._notify()

    async def key_value_try_get(self, key: str) -> str | None:
        return self._values.get(key)

    async def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [each for each in self._values.items() if each[0].startswith(prefix)]

    async def blocking_key_value_get(self, key: str, milliseconds: int) -> str | None:
        await self._until(lambda: key in self._values, milliseconds / 1000)
        return self._values.get(key)

    async def key_value_increment(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + amount)
        return int(self._values[key])

    async def key_value_delete(self, key: str) -> None:
        self._values.pop(key, None)

    async def keep(self, value: Any) -> None:
        """Keeps what the leader has judged, in this process, so that it outlives the leader."""
        self._kept = value

    async def kept(self) -> Any:
        return self._kept
