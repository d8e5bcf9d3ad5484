"""What this process is in its run, and what it has learned of it: all state that a process keeps.

`current` is the one `Runtime` of the process. `blocking_waits` alone keeps the waits beside it, as
`liveness` knows no `comm`. Processes have a runtime of JAX in common, or in a run apart a
`Membership` each. JAX has no public interface to what `jax.distributed` knows, and to how it is
used. This module alone uses the private one.
"""

import collections
import ctypes
import functools
from typing import TYPE_CHECKING, Any

from hetjax.comm import hosts
from hetjax.liveness import failure_detector, stall_reporter

if TYPE_CHECKING:  # the launcher needs no NumPy
    from hetjax.comm import membership as membership_lib


class Runtime:
    """Of a process; of one that is alone, too."""

    def __init__(self) -> None:
        self.membership: membership_lib.MembershipClient | None = None
        """In a run apart, once this process has joined it."""
        self.detector = failure_detector.Detector()
        """Tells the other processes what becomes of this one, and hears of them."""
        self.is_alone = False
        """Whether it is to train alone, as it was told; or has said that it does."""
        self.hosts: dict[int, hosts.Host] = {}
        """Of each process, when all have told theirs."""
        self.num_stores: collections.Counter[str] = collections.Counter()
        """How many stores of a name this process has made."""

    @property
    def joined(self) -> Any:
        """What knows of the run, in the words of JAX."""
        if self.membership is not None:
            return self.membership
        from jax._src import distributed

        return distributed.global_state

    @property
    def process_id(self) -> int:
        return self.joined.process_id

    @property
    def num_processes(self) -> int:
        """Of the run; in a run apart its seats, taken or not."""
        return self.joined.num_processes

    @property
    def seats(self) -> int:
        """Of a run apart, which has a worker for each; 0 where processes do not come and go."""
        return 0 if self.membership is None else self.membership.num_processes

    @property
    def client(self) -> Any:
        """Of the values that all processes see; None: this process is alone."""
        return self.joined.client

    @property
    def coordinator_address(self) -> str | None:
        return self.joined.coordinator_address

    @property
    def is_first(self) -> bool:
        """Whether this process says what the others compare theirs with."""
        return self.process_id == 0 if self.membership is None else self.membership.is_first


class Joined(stall_reporter.Roster):
    """The processes of `jax.distributed`."""

    def leave_at_exit(self) -> None:
        """Has JAX leave the run when this process exits, without waiting for the others.

        JAX would wait at its exit until all processes have come to theirs: its client does so when
        it is destroyed. So the client is given up without being destroyed.
        """
        state = current().joined
        for held in (state.client, state.service):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # so that nothing ever destroys it
        state.client = state.service = None


def meet_at_loopback() -> None:
    """Has the collectives of CPUs, which JAX makes later, listen for processes of this machine
    alone. JAX has them listen at the address of the machine's name."""
    import jax
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    def make() -> Any:
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(client, "127.0.0.1") if client else None
        return xla_bridge.make_cpu_client(gloo)

    if jax.config.jax_cpu_collectives_implementation == "gloo":  # type: ignore[attr-defined]
        xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


@functools.cache
def current() -> Runtime:
    """Of this process."""
    return Runtime()
