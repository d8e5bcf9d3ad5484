"""Looks after workers that come and go (`--runtime=apart`): one that dies is started anew, alone.

Exit codes beside those of `supervisor`: 75 was late and is left out, to be started anew; 76 left as
it was asked to. A worker that tells why it ends (it raised) ends the attempt, as in any run.
"""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from typing import Any

from hetjax.comm import membership
from hetjax.comm.membership import LEFT_OUT, REMOVED
from hetjax.launcher import faults, gang, seats, supervisor
from hetjax.liveness import heartbeats

logger = logging.getLogger(__name__)


class ElasticSupervisor(supervisor.Supervisor):
    """As its base, of one run apart, in whose directory users ask."""

    _seats: seats.Seats

    def run(self) -> int:
        where = seats.directory_of_runs()
        with supervisor.directory("hetjax-run-", self._guardian, where) as self.run_directory:
            self._asks = seats.Asks(self.run_directory)
            _, self._busy_secs = membership.patience()
            run = self.run_directory
            logger.info(f"workers come and go by --add={run} and --remove={run}:WORKER")
            return super().run()

    def _environments(self, common: Mapping[str, str]) -> list[dict[str, str]]:
        attempt, num_workers = common["HETJAX_ATTEMPT"], self._options.num_workers
        most = self._options.max_workers or num_workers
        if int(attempt):
            self._seats.server.close()
            shutil.rmtree(self.run_directory / str(int(attempt) - 1), ignore_errors=True)
            logger.warning(
                f"workers 0 to {num_workers - 1} begin; added and removed workers are not known"
            )
        where, late_secs = self.run_directory / attempt, self._options.late_secs
        self._seats = seats.Seats(where, num_workers, most, late_secs)
        self._common, self._has_finished = dict(common), False
        return [{**common, **self._seats.take(seat)} for seat in range(num_workers)]

    def _start(self, seat: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # what its last process said is not its own
            heartbeats.path(self._directory, seat).unlink()
        self._workers.start(seat, {**self._common, **self._seats.take(seat)})

    def _take(self, event: Any) -> None:
        if isinstance(event, gang.WorkerExit):
            leaves = event.worker not in self._seats.staying()
            self._has_finished |= event.returncode <= 0 and self._seats.host.status == "over"
            self._seats.over(event.worker, killed=event.returncode < 0)
            is_ending = self._verdict or self._faults or self._stop_code
            if not is_ending and self._goes_on(event, leaves=leaves):
                return
            if is_ending and event.returncode in (LEFT_OUT, REMOVED):  # in no round of the others
                self._workers.ended(event.worker)
                return
        super()._take(event)

    def _goes_on(self, event: gang.WorkerExit, *, leaves: bool) -> bool:
        """Whether the run goes on without a process that has ended, or with another in its seat."""
        worker, code, options = event.worker, event.returncode, self._options
        is_killed, has_begun = code < 0, (status := self._seats.host.status) != "begins"
        if code == 0 and has_begun and not self._has_finished:
            logger.info(f"worker {worker} ended before the run, without a fault; its seat is empty")
        if not is_killed and code not in (LEFT_OUT, REMOVED):
            return False
        most = options.max_restarts
        is_spent = is_killed and self._restarts >= most
        if is_spent and worker == 0 and not has_begun:
            return False  # the others would wait for what it has to say
        if is_killed and has_begun and not (self._has_finished or status == "goes"):
            return False  # those that are left have only begun to start
        self._workers.ended(worker)
        told = f"{supervisor.end_of(event)}; the others go on; "
        if code == REMOVED or (leaves and not self._has_finished):
            logger.info(f"worker {worker} has left; its seat is empty")
        elif self._has_finished:
            logger.warning(f"{supervisor.end_of(event)} while the others ended")
        elif code == LEFT_OUT:
            logger.warning(f"worker {worker} was late and left out; it is started anew")
            self._start(worker)
        elif not is_spent:
            self._restarts += 1
            logger.warning(f"{told}restart {self._restarts} of {most}")
            self._start(worker)
        else:
            logger.warning(f"{told}its seat stays empty: --max_restarts={most} are spent")
        if not (self._workers.running or self._has_finished):
            self._verdict = supervisor.Verdict(1, "no worker is left", restart=True)
        return True

    def _fault(
        self, snapshots: Mapping[int, heartbeats.Snapshot | None], stopped: set[int]
    ) -> faults.Fault | None:
        for worker in stopped:  # none waits for one that is to end
            if self._has_finished or worker not in self._seats.staying():
                self._workers.kill_one(worker)
        return super()._fault(snapshots, stopped)

    def _condemn(self, fault: faults.Fault) -> None:
        if fault.process is None:
            super()._condemn(fault)
        else:
            self._workers.kill_one(fault.process)

    def _hear(self) -> None:
        super()._hear()
        self._asks.answer(self._answer)

    def _answer(self, request: Mapping[str, Any]) -> str:
        """Does what a user asks; says so.

        Raises:
            ValueError: it cannot be done.
        """
        logger.info(text := self._done(request))
        return text

    def _done(self, request: Mapping[str, Any]) -> str:
        if (worker := request.get("remove")) is not None:
            if worker not in self._seats.start_of:
                there = ", ".join(map(str, sorted(self._seats.start_of)))
                raise ValueError(f"worker {worker} does not run; there are {there}")
            if self._seats.staying() <= {worker}:
                raise ValueError(f"worker {worker} is the last; end the run by Ctrl-C")
            self._seats.ask_to_leave(worker)
            return f"worker {worker} is to leave after its round"
        if (seat := self._seats.free()) is None:
            most = self._options.max_workers or self._options.num_workers
            raise ValueError(f"all {most} seats are taken; start the run with more --max_workers")
        if self._has_finished or self._verdict or self._faults or self._stop_code:
            raise ValueError("the run is at its end")
        if (share := request["cpus"]) is not None or self._options.cpus:
            self._shares.give(seat, 1.0 if share is None else share, self._seats.start_of)
        for group in self._shares.groups:
            self._guardian.add("control_group", group)
        self._start(seat)
        return f"worker {seat} is started"
