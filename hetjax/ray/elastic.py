"""An elastic run over Ray: an actor a seat, begun as Ray has room, replaced as they end."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from hetjax.comm import membership, referee_host
from hetjax.comm.referee import Member
from hetjax.launcher import environment
from hetjax.liveness import stall_reporter
from hetjax.ray import actors, joining

logger = logging.getLogger(__name__)

_CALLS = 1000  # that the host of the referee answers at a time
_LAST_SECS = 20.0  # for the others, when the leader has returned, or the run cannot go on
_KILL_SECS = 5.0  # without the head Ray would try for a minute
_DRAIN_SECS = 2.0  # between two looks for nodes that are drained
_GOES = ("begins", "goes")  # of the status of a run
_HOW = MappingProxyType({"done": referee_host.RETURNED, "raised": "failed", "lost": "ended"})


@dataclasses.dataclass
class Start:
    """A start of a seat's process."""

    member: Member
    actor: Any
    call: Any  # of Ray: where it is, or the function that runs
    value: Any = None  # of Ray: what the function returns
    place: Any = None  # as `actors.Worker.tell`; None: Ray has no room yet


@dataclasses.dataclass
class ElasticRun:
    """The actors of a run, and the referee's.

    Args:
        train_fn: what each of them calls.
        bundles: the resources of each seat.
        attempt: how often the run has begun before.
        min_workers: with which it begins, at least.
        max_failures: how many starts may end before the run does.
        start_secs: how long it waits for room for all seats.
        late_secs: as of `launch`.
        failures: starts that have ended so.
    """

    train_fn: Callable[[], Any]
    bundles: list[dict[str, float]]
    attempt: int
    min_workers: int
    max_failures: int
    start_secs: float
    late_secs: float | None
    failures: int = 0

    def __post_init__(self) -> None:
        import ray

        self._function = ray.put(self.train_fn)
        self._variables = {**environment.allocator(), "HETJAX_ATTEMPT": str(self.attempt)}
        self._variables["HETJAX_NUM_PROCESSES"] = "1"  # each has a JAX of its own
        here = ray.get_runtime_context().get_node_id()
        late, busy = membership.patience(self.late_secs)
        of_host: Any = referee_host.RefereeHost
        self._host: Any = (
            ray.remote(of_host)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_CALLS,
                scheduling_strategy=actors.on_node(here),
            )
            .remote(late, busy, ray.get_runtime_context().gcs_address)
        )
        self._starts: dict[int, Start] = {}  # by seat
        self._head, self._draining = joining.head(), set[str]()  # nodes
        self._looked = 0.0  # for them
        self._next = 0  # incarnation
        self._founders: list[Member] = []
        self._values: dict[Member, tuple[tuple[bool, bool], Any]] = {}
        """Of those that returned: whether it took part, and led; of Ray: what it returned."""

    def run(self) -> actors.Ended:
        """Begins the run, and follows it to its end."""
        import ray

        for seat in range(len(self.bundles)):
            self._start(seat)
        self._await_room()
        self._founders = [s.member for _, s in sorted(self._starts.items()) if s.place]
        ray.get(self._host.found.remote(self._founders))
        for start in self._starts.values():
            if start.place:
                self._begin(start)
        return self._follow()

    def _start(self, seat: int) -> None:
        actor = actors.make(self.bundles[seat], self._variables)
        member, self._next = Member(seat, self._next), self._next + 1
        self._starts[seat] = Start(member, actor, actor.tell.remote())

    def _await_room(self) -> None:
        """Waits until all seats have room, or `start_secs` are over.

        Raises:
            ValueError: fewer than `min_workers` have.
        """
        import ray

        began, said = time.monotonic(), stall_reporter.PERIOD_SECS
        while waiting := {s.call: s for s in self._starts.values() if s.place is None}:
            secs = time.monotonic() - began
            there = len(self._starts) - len(waiting)
            if secs >= self.start_secs:
                if there >= self.min_workers:
                    break
                raise ValueError(
                    f"launch: Ray had room for {there} of {len(self.bundles)} seats within "
                    f"{secs:.0f} s (start_secs), and min_workers is {self.min_workers}"
                )
            if secs >= said:
                seats = ", ".join(str(s.member.rank) for s in waiting.values())
                logger.warning(f"has waited {secs:.0f} s for room for seat {seats}")
                said += stall_reporter.PERIOD_SECS
            timeout = max(min(self.start_secs - secs, 1.0), 0.0)
            for call in ray.wait(list(waiting), timeout=timeout)[0]:
                self._has_room(waiting[call])

    def _has_room(self, start: Start) -> None:
        import ray

        try:
            start.place = ray.get(start.call)
        except ray.exceptions.RayError as error:
            said = f"worker {start.member.rank} did not start: {actors.shortly(error)}"
            self.failures += 1
            if self.failures > self.max_failures:
                raise RuntimeError(f"launch: {said}") from error
            logger.warning(said)
            self._start(start.member.rank)

    def _begin(self, start: Start) -> None:
        seats = len(self.bundles)
        run = start.actor.run_elastic.options(num_returns=2)
        start.call, start.value = run.remote(self._function, self._host, start.member, seats)

    def _follow(self) -> actors.Ended:
        import ray

        watch, status, known, ends = self._host.watch.remote(0), "begins", 0, None
        while True:
            calls = {start.call: start for start in self._starts.values()}
            running = [s for s in self._starts.values() if s.place]
            if status not in _GOES or not self._starts:  # it has ended, or is about to
                if status != "over" or any(all(took) for took, _ in self._values.values()):
                    ends = ends or time.monotonic() + _LAST_SECS
                if not running or (ends and time.monotonic() > ends):
                    return self._at_end(status, running)
            self._look_for_draining()
            for call in ray.wait([*calls, watch], timeout=1.0)[0]:
                if call == watch:
                    try:
                        known, out, status = ray.get(watch)
                    except ray.exceptions.RayError as error:
                        return self._without_referee(error)
                    watch = self._host.watch.remote(known)
                    if status == "lost":
                        return self._at_end(status, running)
                    for member, how in out.items():
                        now = self._starts.get(member.rank)
                        if how == "was late" and now is not None and now.member == member:
                            self._kill(now)
                elif calls[call].place is None:
                    self._has_room(calls[call])
                    if self._starts[calls[call].member.rank] is calls[call]:
                        self._begin(calls[call])
                elif (ended := self._ended(calls[call])) is not None:
                    return ended

    def _look_for_draining(self) -> None:
        """Has workers leave whose nodes are drained."""
        if time.monotonic() < self._looked + _DRAIN_SECS:
            return
        self._draining, self._looked = joining.draining(self._head), time.monotonic()
        for start in self._starts.values():
            if start.place and start.place[1] in self._draining:
                self._host.terminate.remote(start.member)

    def _ended(self, start: Start) -> actors.Ended | None:
        """Goes on after a start has ended, unless the run cannot."""
        import ray

        member, end = start.member, actors.end_of(start.call, start.member.rank)
        del self._starts[member.rank]
        self._kill(start)
        try:
            told = self._host.gone.remote(member, _HOW.get(end.kind, "was killed"))
            how, was_member, status = ray.get(told)
        except ray.exceptions.RayError as error:
            return self._without_referee(error)
        if end.kind == "done":
            self._values[member] = end.value, start.value
            return None
        cause = end.value if isinstance(end.value, Exception) else None
        may_go_on = not was_member or (status == "goes" and _is_of_machine(cause))
        if end.kind == "raised" and (status == "begins" or not may_go_on):
            return actors.Ended(None, cause)
        if status == "begins" and self._founders[0] in self._values:
            words = f"worker {self._founders[0].rank} has returned without a fit, and"
            return actors.Ended(None, cause, f"{words} worker {member.rank} waits for it")
        is_first = status == "begins" and member == self._founders[0]  # the others follow it
        is_stopped = "terminated expectedly" in end.words  # Ray's words of its node
        if is_stopped or start.place[1] in self._draining:
            how = "left"
        said = f"worker {member.rank} {how}"
        if how != "left":
            said += f": {end.words or actors.shortly(end.value)}"
            self.failures += status in _GOES or (was_member and end.kind == "died")
        if status not in _GOES:
            if was_member and how != "left":
                logger.warning(f"{said}; the run was over")
            return None
        if how != "left" and self.failures > self.max_failures:
            if is_first or not self._starts:
                return actors.Ended(None, cause, said)
            logger.warning(f"{said}; its seat stays empty: max_failures are spent")
            return None
        if is_first:
            return actors.Ended(None, words=said, is_lost=True)
        logger.warning(f"{said}; it begins anew where there is room")
        self._start(member.rank)
        return None

    def _without_referee(self, error: Exception) -> actors.Ended:
        """Waits until each worker has found, and said, that the referee is gone."""
        import ray

        calls = self.calls()
        ray.wait(calls, num_returns=len(calls), timeout=_LAST_SECS)
        return actors.Ended(None, error, f"the run has lost its referee: {actors.shortly(error)}")

    def _at_end(self, status: str, running: list[Start]) -> actors.Ended:
        """With what the leader's function returned; where that is lost, another's: all have the
        same state, and know what the leader has judged."""
        import ray

        if status not in ("over", "lost", *_GOES):
            return actors.Ended(None, words=f"the run {status}")
        for start in running if status == "over" else ():
            logger.warning(f"worker {start.member.rank} has not returned, and is ended")
        values = sorted(self._values.values(), key=lambda each: each[0], reverse=True)
        for (took_part, _), value in values:
            if status == "begins" or took_part:
                with contextlib.suppress(ray.exceptions.RayError):  # its node is lost
                    return actors.Ended(ray.get(value))
        words = "the run is over, and no worker is left to return its result"
        if status == "lost":
            words = "no worker has the state of the run"
        return actors.Ended(None, words=words, is_lost=True)

    def calls(self) -> list[Any]:
        """Of the function, where it runs."""
        return [start.call for start in self._starts.values() if start.place]

    def stop(self) -> None:
        """Has the run end its round and save, as far as it has come."""
        self._host.stop.remote("ends the run after this round: Ctrl-C")

    def kill(self) -> None:
        self._kill(*self._starts.values(), last=self._host).join(_KILL_SECS)

    def _kill(self, *starts: Start, last: Any = None) -> threading.Thread:
        """Kills actors, in a thread; without the head, for which Ray waits a minute, they end
        themselves.

        Args:
            starts: whose actors.
            last: another one, when they are gone, so that none finds it gone.
        """
        import ray

        def kill() -> None:
            for start in starts:
                ray.kill(start.actor)
            if last is not None:
                if calls := [start.call for start in starts]:
                    ray.wait(calls, num_returns=len(calls))
                ray.kill(last)

        killing = threading.Thread(target=kill, daemon=True)
        killing.start()
        return killing


def _is_of_machine(error: Exception | None) -> bool:
    """Whether an error is likely one of a machine, such as of its disk or memory."""
    cause = getattr(error, "cause", error)
    return isinstance(cause, OSError | MemoryError) or "RESOURCE_EXHAUSTED" in str(cause)
