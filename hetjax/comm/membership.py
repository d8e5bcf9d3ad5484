"""Who takes part in a run whose processes come and go, as one of them sees it.

The processes have no runtime of JAX in common. A referee decides each round (`referee`); a carrier
reaches it. What starts the processes gives each start a number, and tells the referee which starts
are over. A process that is no member any more, or hears nothing of the referee, ends itself: a
thread asks every half a second.
"""

import logging
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from hetjax.comm import carrier as carrier_lib
from hetjax.comm import local_carrier, referee, referee_host
from hetjax.comm.views import Member, MembershipView
from hetjax.liveness import heartbeats as heartbeats_lib
from hetjax.liveness import stall_reporter

logger = logging.getLogger(__name__)

LEFT_OUT, REMOVED = 75, 76  # exit codes: to be started anew; its seat is empty now
LOST = 77  # exit code: nobody is left to go on with
LATE_SECS, BUSY_SECS = 10.0, 600.0  # unless `HETJAX_LATE_SECS`, `HETJAX_BUSY_SECS` say otherwise
_BEAT_SECS = 0.5
_SIGNALS = MappingProxyType({"stop": signal.SIGUSR1, "terminate": signal.SIGTERM})  # of orders


class MembershipClient(stall_reporter.Roster):
    """Of this process.

    Args:
        carrier: to the referee, and to the other members.
        own: this start of a process.
        seats: of the run, taken or not.
    """

    coordinator_address = None

    def __init__(self, carrier: carrier_lib.Carrier, own: Member, *, seats: int) -> None:
        self.carrier, self.own, self.num_processes = carrier, own, seats
        self.process_id, self.incarnation = own
        self.client = carrier_lib.HostStore(self.ask)
        self.last: MembershipView | None = None  # that this process has adopted
        self._gone: set[Member] = set()
        self.is_taken = self._is_leaving = False
        self._obeyed: set[str] = set()  # orders to this process
        self.has_returned = False  # the function that trains
        self._num_moved = 0  # bytes
        self._heartbeats = heartbeats_lib.Heartbeats()  # of the run, once there is one
        self._founders: tuple[Member, ...]
        self._founders, self.run_id = self.ask("enter", own)
        self.is_newcomer = own not in self._founders
        """Whether the run goes on without this process, or begins so."""
        threading.Thread(target=self._beat, name="hetjax-beat", daemon=True).start()

    @property
    def is_guest(self) -> bool:  # type: ignore[override]
        """Whether it has come to a run that goes on, and is no member yet."""
        return self.is_newcomer and self.last is None

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the next round, as far as this process knows; the one that came first is first."""
        return self._founders if self.last is None else self.last.members

    @property
    def is_first(self) -> bool:
        """Whether this process says what the others compare theirs with."""
        return not self.is_newcomer and self.process_id == self._founders[0].rank

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports: the first member that lives."""
        if self.last is None:
            return self.is_first
        return next((m for m in self.members if m not in self._gone), None) == self.own

    def others(self) -> set[int]:
        """The ranks of other members that live, as far as is known here."""
        return {m.rank for m in self.members if m not in self._gone} - {self.process_id}

    def living(self, others: set[int]) -> set[int]:
        return others & self.others()

    def ask_to_leave(self) -> None:
        """Has the referee let this member go after its round; for a signal's handler."""
        self._is_leaving = True

    def follow(self, heartbeats: heartbeats_lib.Heartbeats) -> None:
        self._heartbeats = heartbeats

    def end_over(self) -> NoReturn:
        """Ends this newcomer, whose run is over."""
        self.end(REMOVED, "came when the run had ended")

    def end_guest(self, words: str) -> None:
        if self.is_guest:
            self.end(REMOVED, f"{words}, before it had joined; the others go on")

    def end(self, code: int, words: str) -> NoReturn:
        """Ends this process at once; the others go on."""
        if self.has_returned:  # so the thread that asks ends alone
            sys.exit()
        logger.warning(f"worker {self.process_id} {words}")
        sys.stdout.flush()
        os._exit(code)

    # --- The referee ---

    def call(
        self,
        round_index: int | None,
        event: tuple[Any, ...] | None = None,
        *,
        failed: tuple[int, int] | None = None,
        waits: bool = True,
    ) -> referee.Order:
        """Tells an event, and waits a while for an order other than to wait; as `RefereeHost.call`.

        It ends this process where that is no member any more, or hears nothing of the referee.
        """
        return self.hear("call", self.own, round_index, event, failed, waits)

    def ask(self, method: str, *args: Any) -> Any:
        """What a method of the referee's host returns."""
        since = time.monotonic()
        while True:
            try:
                return self.carrier.call(method, *args)
            except carrier_lib.LostRefereeError as error:
                if error.is_final or time.monotonic() - since > self.carrier.lost_secs:
                    self.end(LOST, f"has lost the referee of its run: {error}")
                time.sleep(_BEAT_SECS)

    def hear(self, method: str, *args: Any) -> referee.Order:
        """The order of a method's answer; who is no member ends."""
        answer: referee_host.Answer = self.ask(method, *args)
        self._gone.update(answer.gone)
        kind, what = answer.order
        if (kind, what) == ("leave", "left"):
            self.end(REMOVED, "leaves, as it was asked to")
        if kind == "leave":
            self.end(LEFT_OUT, f"{what} and is left out; it begins anew")
        if kind == "ended":
            self.end(LOST, what or "finds no worker that has the state of the run")
        if kind in _SIGNALS and kind not in self._obeyed:
            self._obeyed.add(kind)
            logger.warning(f"worker {self.process_id} {what or 'is asked to leave'}")
            os.kill(os.getpid(), _SIGNALS[kind])
        return answer.order

    def put(self, array: np.ndarray) -> Any:
        """As of the carrier; it ends this process where its node is lost."""
        try:
            return self.carrier.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        except carrier_lib.LostRefereeError as error:
            self.end(LOST, f"has lost its node: {error}")

    def take(self, handles: Sequence[Any], over: tuple[int, int]) -> list[np.ndarray] | None:
        """The same; while something comes this process is not late."""
        try:
            return self.carrier.take(handles, over, self._moved)
        except carrier_lib.LostRefereeError as error:
            self.end(LOST, f"has lost its node: {error}")

    def _moved(self, num_bytes: int) -> None:
        self._num_moved += num_bytes

    def _beat(self) -> None:
        """Tells what this process does, and ends it when it is no member any more."""
        while not self.has_returned:
            entry = self._heartbeats.now()
            phase, since = ("", 0.0) if entry is None else (entry.phase, entry.since)
            progress = self._num_moved, phase, since
            self.hear("beat", self.own, phase, progress, self._is_leaving)
            time.sleep(_BEAT_SECS)


def of_environment() -> MembershipClient | None:
    """The membership that the launcher gives this process; None where the run is not apart.

    Raises:
        ValueError: another than the launcher says that it is.
    """
    runtime = os.environ.get("HETJAX_RUNTIME", "joined")
    if runtime == "joined":
        return None
    if runtime != "apart" or "HETJAX_RUN" not in os.environ:
        raise ValueError(
            f"HETJAX_RUNTIME={runtime}: must be joined or apart, and only the launcher starts such "
            "runs: python -m hetjax.launch --runtime=apart"
        )
    names = ("PROCESS_ID", "START", "NUM_PROCESSES")
    rank, incarnation, seats = (int(os.environ[f"HETJAX_{name}"]) for name in names)
    carrier = local_carrier.LocalCarrier(pathlib.Path(os.environ["HETJAX_RUN"]), incarnation)
    return MembershipClient(carrier, Member(rank, incarnation), seats=seats)


def patience(late_secs: float | None = None) -> tuple[float, float]:
    """How long, at least, the others wait for a member that makes no progress, and for one that
    does work of its own, in seconds: as is said, as of the environment, or else the defaults."""
    if late_secs is None:
        late_secs = float(os.environ.get("HETJAX_LATE_SECS", LATE_SECS))
    return late_secs, float(os.environ.get("HETJAX_BUSY_SECS", BUSY_SECS))
