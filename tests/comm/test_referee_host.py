"""The referee's host: who is late, by its own clock, and who begins a run."""

import asyncio
import itertools

import pytest

from hetjax.comm import referee_host
from hetjax.comm.referee import Member

NEW = Member(3, 3)


class Clock:
    """Of the host, whose looks are a millisecond apart."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(referee_host, "time", self)
        monkeypatch.setattr(referee_host, "_LOOK_SECS", 0.001)

    def monotonic(self):
        self.was_read = True
        return self.now

    async def look(self):
        """Waits until the host has looked, however busy the machine is."""
        self.was_read = False
        while not self.was_read:
            await asyncio.sleep(0.001)

    async def forward(self, host, secs, *beats):
        """In steps of a second, in each of which members tell what they do."""
        for _ in range(secs):
            self.now += 1.0
            for member, phase, progress in beats:
                await host.beat(member, phase, progress() if callable(progress) else progress)
            await self.look()


A, B, C = (Member(rank, rank) for rank in range(3))


async def a_host(*members):
    host = referee_host.RefereeHost(late_secs=10.0, busy_secs=30.0)
    await host.found(list(members))
    for member in members:
        await host.call(member, -1, ("begins", member, -1), waits=False)
    for event in (("ready", 0, "", []), ("has", 0, 0)):
        for member in members:
            await host.call(member, 0, (event[0], member, *event[1:]), waits=False)
    return host


async def out(host):
    return (await host.watch(-1))[1]


def ready(host, member):
    return host.call(member, 1, ("ready", member, 1, "", []), waits=False)


def test_who_makes_no_progress_is_left_out_after_patience(monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        host = await a_host(A, B, C)
        await clock.forward(host, 50)  # nobody is ready, so nobody is waited for
        await ready(host, A)
        await clock.forward(host, 9, (B, "computing", 0))
        await ready(host, B)
        assert await out(host) == {}
        await clock.forward(host, 3)
        assert await out(host) == {C: "was late"}
        answer = await host.call(C, 1)
        assert answer.order == ("leave", "was late")
        assert (await host.call(A, 1, waits=False)).order.kind == "take"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("phase", "progress", "secs"),
    [
        ("computing", 0, 10),
        ("evaluating", 0, 30),
        ("starting", 0, 30),
        ("computing", itertools.count().__next__, 100),  # bytes that have come
    ],
)
def test_work_of_its_own_and_bytes_that_come_make_nobody_late(phase, progress, secs, monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        host = await a_host(A, B)
        await host.beat(B, phase, None)
        await ready(host, A)
        await clock.forward(host, secs - 1, (B, phase, progress))
        assert await out(host) == {}
        if secs < 100:
            await clock.forward(host, 12, (B, phase, progress))
            assert await out(host) == {B: "was late"}

    asyncio.run(run())


def test_who_says_that_it_is_busy_and_then_nothing_is_late(monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        host = await a_host(A, B)
        await host.beat(B, "evaluating", 0)
        await ready(host, A)
        await clock.forward(host, 12)
        assert await out(host) == {B: "was late"}

    asyncio.run(run())


def test_after_the_host_was_paused_patience_begins_anew(monkeypatch):
    clock = Clock(monkeypatch)

    async def run():
        host = await a_host(A, B)
        await ready(host, A)
        for _ in range(3):
            await clock.forward(host, 6)
            clock.now += 100.0
            await clock.look()
            assert await out(host) == {}
        await clock.forward(host, 12)
        assert await out(host) == {B: "was late"}

    asyncio.run(run())


@pytest.mark.parametrize("dies", ["before it is named", "before it comes", "after it came"])
def test_the_run_begins_without_founders_that_die_before(dies, caplog):
    async def run():
        host = referee_host.RefereeHost(late_secs=10.0, busy_secs=30.0)
        if dies == "before it is named":
            await host.gone(B, "was killed")
        await host.found([A, B, C])
        await host.call(C, 4, ("begins", C, 4), waits=False)
        if dies == "after it came":
            await host.call(B, 4, ("begins", B, 4), waits=False)
        if dies != "before it is named":
            await host.gone(B, "was killed")
        await host.call(NEW, None, ("joins", NEW), waits=False)  # before it has begun
        answer = await host.call(A, 4, ("begins", A, 4))
        assert answer.order.kind == "apply"
        assert answer.order.what.members == (A, C)
        assert (await host.call(B, 4)).order.kind == "leave"
        for event in (("ready", 5, "", []), ("has", 5, 0)):
            for member in (A, C):
                await host.call(member, 5, (event[0], member, *event[1:]), waits=False)
        view = (await host.call(A, 5)).order.what
        assert (view.round_index, view.joining) == (5, (NEW,))

    asyncio.run(run())
