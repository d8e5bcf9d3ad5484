"""The clocks of the workers: emulated, or when their microbatches are really done."""

import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hetjax import types
from hetjax.cluster import emulate
from hetjax.gates import gate as gate_lib
from hetjax.liveness import blocking_waits


class WorkerClock:
    """The emulated clock of the workers; without a cluster, the real one.

    Args:
        cluster: the emulated speeds, if any; on the virtual clock by default 1 second a microbatch.
        virtual: take times from the cluster instead of sleeping.
        num_workers: W.
        gate: closes the rounds of the virtual clock.
        drop: what is in flight then is given up.
    """

    def __init__(
        self,
        cluster: emulate.EmulatedCluster | None,
        *,
        virtual: bool,
        num_workers: int,
        gate: gate_lib.Gate | None = None,
        drop: bool = False,
    ) -> None:
        if cluster is None and virtual:
            cluster = emulate.EmulatedCluster((1.0,) * num_workers)
        self._cluster, self.virtual = cluster, virtual
        self._gate, self._drop = gate, drop

    def ends(self, round_index: int | None, worker: int, count: int) -> np.ndarray | None:
        """f64[count]: seconds into the round at which each microbatch ends; None = real."""
        if self._cluster is None or round_index is None:
            return None
        return self._cluster.microbatch_ends(round_index, worker, count)

    def close(self, round_index: int, quotas: np.ndarray) -> gate_lib.Closing | None:
        """How far the workers get in a round; None where their threads ask the gate themselves."""
        if self._gate is None or self._cluster is None:
            return None
        ends = emulate.ends_of(self._cluster, round_index, quotas)
        return gate_lib.close(self._gate, ends, quotas, drop=self._drop)


class Times:
    """When a worker's microbatches of a round are done.

    Args:
        shared: what it begins with; to wait for it is not this worker's compute.
        started: called when it is there.
        deadlines: f64[n] or None: the emulated ends.
        tell: called with how many are done; None: it is not asked for.
    """

    def __init__(
        self,
        shared: types.Shared,
        started: Callable[[], None],
        deadlines: np.ndarray | None,
        tell: Callable[[int], None] | None,
    ) -> None:
        self._shared, self._started = shared, started
        self._deadlines, self._tell = deadlines, tell
        self.are_own = tell is None and deadlines is None
        """Whether neither a gate nor an emulated clock looks at them."""
        self.start, self.overruns = 0.0, 0
        self.stamps: list[float] = []
        self.in_flight: collections.deque[Any] = collections.deque()

    def begin(self) -> None:
        """Waits once for what the worker begins with, with which its time begins."""
        started, self._started = self._started, nothing
        if started is nothing:
            return
        try:
            with blocking_waits.Wait("synchronise"):
                jax.block_until_ready(self._shared)
        finally:
            started()
        self.start = time.perf_counter()

    def wait(self, most: int) -> None:
        """Until less than `most` are in flight; notes the others that are done by now."""
        while len(self.in_flight) >= most or (self.in_flight and self.in_flight[0].is_ready()):
            self.begin()
            self.in_flight.popleft().block_until_ready()
            if self._deadlines is not None:
                late = time.perf_counter() - self.start - self._deadlines[len(self.stamps)]
                self.overruns += late >= 0
                time.sleep(max(-late, 0))
            self.stamps.append(time.perf_counter() - self.start)
            if self._tell is not None:
                self._tell(len(self.stamps))


def nothing() -> None:
    """Where nothing is to be called."""
