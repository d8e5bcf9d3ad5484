"""The local phase on one process: where the local rule runs, and how it is timed.

`Stepped` runs it from a host thread for each worker, on the worker's own device, as often as
the quota says. A quota never compiles anything, and each worker's compute is timed alone.
`virtual.py` and `fused.py` hold the two other ways.
"""

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import executor, placement, starting, types
from hetjax import mesh as mesh_lib
from hetjax.data import feed as feed_lib
from hetjax.data import stream
from hetjax.gates import gate as gate_lib
from hetjax.liveness import heartbeats as heartbeats_lib
from hetjax.local import calls, clocks, rules

_Measured = tuple[int, float, float, int, list]
"""Of a worker: microbatches, seconds of the first and of all, overruns, signs of examples."""


class LocalPlan(NamedTuple):
    """What the workers are to do in a round."""

    round_index: int | None  # None: warms up, without emulated speeds
    assigned: stream.Assignment
    limits: np.ndarray  # i64[W]: microbatches that each worker does at most, where that is known
    feed: feed_lib.Feed  # brings their examples
    may_close: bool = True  # by a gate


def pass_keys(
    rng: jax.Array, where: placement.Placement
) -> Callable[[np.ndarray], list[jax.Array]]:
    """From the pass that each worker is in, i64[W], to the keys of the own workers' passes.

    Each is on its worker's device; they are made anew when a pass begins.
    """
    fold_in = executor.compiled(jax.random.fold_in)  # which models compile, too
    places = [where.places[worker] for worker in where.own]

    @functools.lru_cache(1)
    def keys(passes: bytes) -> list[jax.Array]:
        own = np.frombuffer(passes, np.int64)[where.own].tolist()
        made = {each: fold_in(rng, np.uint32(each)) for each in set(own)}
        return [jax.device_put(made[one], place) for one, place in zip(own, places, strict=True)]

    return lambda passes: keys(passes.tobytes())


class Stepped:
    """A host thread and a device for each worker (the default).

    A thread keeps `depth` microbatches in flight. It waits for the oldest before it begins another
    one, stamps its clock when that is done, and then tells the gate, or sleeps up to the emulated
    end. One worker needs no thread of its own: the calling one does the host's work once the first
    microbatches are in flight.

    With more than one in flight a device has its next work before it is done: the first
    microbatches are dispatched before the last synchronisation is over, with which their time
    begins, and the next one before the last microbatches are. Neither is so with a gate or with
    emulated speeds, whose workers begin and end when the clock says.

    Args:
        steps: the local rule; jitted here, so it compiles once for each device.
        where: of the workers; without a mesh what they share lies on the first device, from where
            it is moved to each worker's and back.
        clock: emulated or real clocks.
        gate: polled between microbatches; None: no round is closed.
        heartbeats: told what each worker does.
        begins: told which worker compiles.
        signed: whether the order takes signs.
        depth: microbatches that a device has been given and not finished, at most.
        finishes: the workers' sums; else the synchronisation is given what they carry.
        eager: in the calling thread, worker after worker, by a rule that is not
            jitted.
    """

    def __init__(
        self,
        steps: rules.LocalSteps,
        where: placement.Placement,
        *,
        clock: clocks.WorkerClock,
        gate: gate_lib.Live | None,
        heartbeats: heartbeats_lib.Heartbeats,
        begins: starting.Starting,
        signed: bool = False,
        depth: int = 1,
        finishes: bool = True,
        eager: bool = False,
    ) -> None:
        self._begins, self._eager, self._depth = begins, eager, depth
        self._where, self._workers = where, where.own
        self._places = [where.places[worker] for worker in where.own]
        self._clock, self._gate, self._heartbeats = clock, gate, heartbeats
        count = len(self._workers)
        self._finish = calls.jit_finish(steps, where) if finishes else [None] * count
        eagerly = functools.partial(calls.add_eagerly, steps)
        self._add = [eagerly] * count if eager else calls.jit_adds(steps, where, marked=depth > 1)
        self._signed = signed
        self._is_alone = len(self._workers) == 1 and not eager
        has_threads = len(self._workers) > 1 and not eager
        self._threads = worker_threads(len(self._workers)) if has_threads else executor.Inline()
        check_threads(self._threads)
        self._stopping = threading.Event()
        self._frozen: list[types.PyTree] | None = None  # of each worker, on its device
        self._starts = 0  # of workers in this round
        self._lock, self._all_started = threading.Lock(), threading.Lock()
        self._all_started.acquire()  # released when all workers have started

    def run(
        self,
        plan: LocalPlan,
        shared: types.Shared,
        carried: types.Carried,
        rngs: Sequence[jax.Array],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[types.Contribution, Callable[[], types.Work]]:
        """Runs at most `plan.limits[w]` microbatches of each worker; uses up `carried`.

        Leaves of `shared`, but those of `given` and `named.frozen`, and of what is contributed are
        `[W, ...]`; `carried` was begun with `given`. `rngs` holds the key of each own worker's
        pass, on its device; `meanwhile` is called while the workers compute. `Fused` and `Virtual`
        have the same function; the rest of the loop does not know which it calls.

        Returns:
            what they contribute, which the devices may not have computed yet; and what waits for
            them and says what they did.
        """
        round_index, assigned, _, feed, may_close = plan
        of_workers = shared.params, shared.model_state, shared.named.values, carried
        rows = self._where.rows(of_workers)
        handed_out = [shared.given] * len(self._workers)
        if jax.tree.leaves(shared.given):
            handed_out = [jax.device_put(shared.given, place) for place in self._places]
        if self._frozen is None:  # it is the same in all rounds
            self._frozen = mesh_lib.copies(shared.named.frozen, self._places)
        gate = self._gate if may_close else None
        if gate is not None:
            gate.begin(assigned.quotas)
        host_work = functools.cache(meanwhile)  # the first one calls it
        work_of = executor.moving(self._work, in_thread=True)
        tasks: list[concurrent.futures.Future] = []
        try:
            for index, worker in enumerate(self._workers):
                params, model_state, values, begun = rows[index]
                named = types.Named(self._frozen[index], values)
                task = self._threads.submit(
                    work_of,
                    plan,
                    worker,
                    types.Shared(params, handed_out[index], model_state, named),
                    begun,
                    rngs[index],
                    gate,
                    host_work if self._is_alone else clocks.nothing,
                )
                tasks.append(task)
                if round_index is None and not index:  # the others load what it compiles
                    self._begins.detail(f"worker 1 of {len(self._workers)}")
                    concurrent.futures.wait([task])
            for index in range(1, len(tasks) if round_index is None else 0):
                self._begins.detail(f"worker {index + 1} of {len(self._workers)}")
                concurrent.futures.wait([tasks[index]])
            self._all_started.acquire()  # the host's own work must not delay a worker's start
            host_work()
            done = [task.result() for task in tasks]
        except BaseException:  # Ctrl-C, or a worker failed: the others stop after their microbatch
            self._stopping.set()
            feed.close()  # or a source that blocks would hold a worker for ever
            concurrent.futures.wait(tasks)
            self._stopping.clear()
            self._starts = 0
            self._all_started.acquire(blocking=False)
            raise
        contributed, measured = zip(*done, strict=True)

        def work() -> types.Work:
            of_workers = [each() for each in measured]
            counts, first_secs, compute_secs, overruns, signs = zip(*of_workers, strict=True)
            size = assigned.example_ids.shape[1]
            return types.Work(
                microbatches_done=np.asarray(counts),
                first_secs=np.asarray(first_secs),
                compute_secs=np.asarray(compute_secs),
                overruns=np.asarray(overruns),
                example_signs=stack_signs(signs, size) if self._signed else None,
            )

        return mesh_lib.join_rows(contributed, self._where.mesh), work

    def _work(
        self,
        plan: LocalPlan,
        worker: int,
        shared: types.Shared,
        carried: types.Carried,
        rng: jax.Array,
        gate: gate_lib.Live | None,
        host_work: Callable[[], None],
    ) -> tuple[types.Contribution, Callable[[], _Measured]]:
        round_index, assigned, limits, feed, _ = plan
        index = self._workers.index(worker)
        add, finish = self._add[index], self._finish[index]
        rows = assigned.microbatches(worker, int(limits[worker]))
        pass_index = int(assigned.passes[worker])
        ends = self._clock.ends(round_index, worker, len(rows))
        tell = None if gate is None else functools.partial(gate.finished, worker)
        times = clocks.Times(shared, self._has_started, None if self._clock.virtual else ends, tell)
        is_ahead = self._depth > 1 and times.are_own and len(rows) > 0
        signs: list[Any] = []
        read = feed.load if self._eager else feed.lend
        try:
            if not is_ahead or all(leaf.is_ready() for leaf in jax.tree.leaves(shared)):
                times.begin()
            self._heartbeats.at("loading", round_index, worker)
            feed.wait(rows[:1], pass_index)  # which is not this worker's compute
            times.start = time.perf_counter()
            for position, example_ids in enumerate(rows):
                is_open = gate is None or gate.is_open()
                if self._stopping.is_set() or (position and not is_open):
                    break
                self._heartbeats.at("loading", round_index, worker)
                microbatch = read(worker, example_ids, pass_index)
                self._heartbeats.at("computing", round_index, worker)
                carried, example_signs, *mark = add(shared, carried, microbatch, rng)
                # All that a program returns is there at once.
                times.in_flight.append(mark[0] if mark else jax.tree.leaves(carried)[-1])
                signs.append(example_signs)
                if len(times.in_flight) >= self._depth:
                    times.begin()
                    host_work()
                times.wait(self._depth)
        finally:
            times.begin()

        def measured() -> _Measured:
            times.wait(1)
            self._heartbeats.at("waiting", round_index, worker)
            stamps = times.stamps
            if ends is not None and self._clock.virtual:
                stamps = ends[: len(stamps)].tolist()
            first, last = (stamps[0], stamps[-1]) if stamps else (np.nan, 0.0)
            return len(stamps), first, last, times.overruns, signs

        told: Callable[[], _Measured] = functools.cache(measured)
        if not is_ahead:
            told()
        contributed: Any = carried if finish is None else finish.call(shared, carried)
        if self._where.mesh is None:
            contributed = jax.device_put(contributed, self._places[0])
        if is_ahead and not self._is_alone:
            told = self._threads.submit(measured).result
        return contributed, told

    def _has_started(self) -> None:
        with self._lock:
            self._starts = (self._starts + 1) % len(self._workers)
            is_last = self._starts == 0
        if is_last:
            self._all_started.release()

    def close(self) -> None:
        self._stopping.set()
        self._threads.shutdown(wait=True, cancel_futures=True)


def worker_threads(num_workers: int) -> concurrent.futures.ThreadPoolExecutor:
    """A host thread for each worker."""
    return concurrent.futures.ThreadPoolExecutor(num_workers, "hetjax-worker")


def check_threads(threads: concurrent.futures.Executor) -> None:
    """Refuses settings of JAX that hold only in the caller's thread.

    Raises:
        ValueError: 64-bit numbers or a matmul precision were set by a `with` block.
    """

    def settings() -> dict[str, Any]:
        names = ("jax_enable_x64", "jax_default_matmul_precision")
        return {name: getattr(jax.config, name) for name in names}

    here, there = settings(), threads.submit(settings).result()
    for name, value in here.items():
        if there[name] != value:
            raise ValueError(
                f"{name} is {value!r} by a `with` block, which threads do not see; set it by "
                f"jax.config.update({name!r}, {value!r})"
            )


def stack_signs(signs: Sequence[Sequence[Any]], size: int) -> list[np.ndarray]:
    """The example signs of each worker, i8[done, size], on the host."""
    return [np.asarray(jax.device_get(s), np.int8).reshape(-1, size) for s in signs]
