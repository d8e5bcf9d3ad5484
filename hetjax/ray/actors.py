"""The actors of one attempt of `launch`: made, followed until one end decides about all, ended."""

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

from hetjax.comm import join as join_lib
from hetjax.comm import membership, runtime
from hetjax.comm.referee import Member
from hetjax.launcher import environment
from hetjax.liveness import exit_reports, failure_detector, stall_reporter
from hetjax.ray import carrier, joining

logger = logging.getLogger(__name__)

# In which the cause may still come.
_SETTLE_SECS = MappingProxyType({"raised": 1.0, "lost": 3.0, "died": 0.0})
_OPTIONS = MappingProxyType({"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"})
_KINDS = "launch: workers {with_} have an accelerator, and {without} none; all need the same kind"


class End(NamedTuple):
    """How one worker's part of an attempt ended."""

    worker: int
    kind: str  # done; raised: by the function; lost: for want of the others; died: the process did
    value: Any = None  # of done: what the function returned; of raised and died: Ray's error
    words: str = ""


class Ended(NamedTuple):
    """How an attempt ended."""

    value: Any
    error: Exception | None = None
    words: str = ""
    is_lost: bool = False  # all may start anew, from a checkpoint


class Worker:
    """What an actor does."""

    def tell(self) -> tuple[int, str, str, bool]:
        """Its process, node, a free HOST:PORT there, and whether JAX computes on an accelerator."""
        from importlib import metadata

        import ray

        context = ray.get_runtime_context()
        has = any(context.get_accelerator_ids().values())
        uses = os.environ.get("JAX_PLATFORMS", "") != "cpu"
        accelerates = has and uses and bool(metadata.entry_points(group="jax_plugins"))
        return os.getpid(), context.get_node_id(), joining.own_address(), accelerates

    def run(self, train_fn: Callable[[], Any], own: int, size: int, address: str) -> Any:
        """(how it ended, what it returned or in words why)."""
        return _ran(
            train_fn,
            lambda: join_lib.join_processes(own, size, address),
            lambda result: _without_state(result) if own == 0 else None,
        )

    def run_elastic(
        self, train_fn: Callable[[], Any], host: Any, own: Member, seats: int
    ) -> tuple[tuple[str, Any], Any]:
        """The same of a member of an elastic run: how it ended, with whether it took part and
        whether it leads, or in words why; and what the function returned."""
        roster = membership.MembershipClient(carrier.RayCarrier(host), own, seats=seats)
        runtime.current().membership = roster  # what the function calls finds that it has joined
        try:
            kind, value = _ran(train_fn, lambda: join_lib.join(None), _without_state)
        finally:
            roster.has_returned = True
        if kind == "lost":
            signal.alarm(5)  # ends this process, which Ray, without its head, does after a minute
            return (kind, value), None
        return (kind, (roster.is_taken, roster.leads)), value


def _ran(
    train_fn: Callable[[], Any], join: Callable[[], object], kept: Callable[[Any], Any]
) -> tuple[str, Any]:
    of_ray = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no handler of the program's own
    try:
        join()
        result = train_fn()
    except SystemExit as error:
        if error.code:
            return "lost", f"left by {error!r}"
        result = None
    except Exception as error:
        if failure_detector.is_loss(error):
            return "lost", f"has lost the others: {str(error).splitlines()[0]}"
        raise
    finally:
        signal.signal(signal.SIGTERM, of_ray)
    return "done", kept(result)


def _without_state(result: Any) -> Any:
    """A result of `fit` without its state, which lies on the devices of all processes."""
    from hetjax.records import results

    if not isinstance(result, results.SavedRun):
        return result
    names = [field.name for field in dataclasses.fields(results.SavedRun)]
    return results.SavedRun(**{name: getattr(result, name) for name in names})


class Workers:
    """The actors of one attempt, in a placement group: they get their resources together."""

    failures = 0

    def __init__(
        self,
        train_fn: Callable[[], Any],
        bundles: list[dict[str, float]],
        attempt: int,
        secs: float,
    ) -> None:
        self._train_fn, self._bundles, self._start_secs = train_fn, bundles, secs
        # Other variables than before, so Ray starts new processes for them.
        self._variables = {**environment.allocator(), "HETJAX_ATTEMPT": str(attempt)}
        self._group: Any = None
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}  # the worker of each call of `run`
        self._places: list[tuple[int, str, str, bool]] = []

    def run(self) -> Ended:
        """Makes the actors and runs the function in them."""
        end = self._run()
        if end.kind in ("done", "raised"):
            return Ended(end.value) if end.kind == "done" else Ended(None, end.value)
        self.failures = 1
        return Ended(None, end.value, f"worker {end.worker} {end.words}", is_lost=True)

    def _run(self) -> End:
        """The end that decides about all."""
        import ray

        self._make()
        places = {actor.tell.remote(): worker for worker, actor in enumerate(self._actors)}
        for call, worker in places.items():
            try:
                self._places.append(ray.get(call))
            except ray.exceptions.RayActorError as error:
                return End(worker, "died", error, f"died: {shortly(error)}")
        kinds = [place[-1] for place in self._places]
        if len(set(kinds)) > 1:
            which = {kind: [w for w, k in enumerate(kinds) if k is kind] for kind in (True, False)}
            raise ValueError(_KINDS.format(with_=which[True], without=which[False]))
        address, size, function = self._places[0][2], len(self._actors), ray.put(self._train_fn)
        self._running = {
            actor.run.remote(function, worker, size, address): worker
            for worker, actor in enumerate(self._actors)
        }
        return self._follow()

    def _make(self) -> None:
        import ray
        from ray.util import placement_group, scheduling_strategies

        self._group = placement_group(self._bundles)
        began = time.monotonic()
        while not self._group.wait(min(stall_reporter.PERIOD_SECS, self._start_secs)):
            secs = time.monotonic() - began
            has, asked = ray.cluster_resources(), {name for each in self._bundles for name in each}
            found = {name: has.get(name, 0.0) for name in sorted(asked)}
            said = f"room for {self._bundles} in a cluster that has {found} in all"
            if secs >= self._start_secs:
                raise ValueError(f"launch: there was no {said} for {secs:.0f} s (start_secs)")
            logger.warning(f"has waited {secs:.0f} s for {said}")
        for index, bundle in enumerate(self._bundles):
            strategy = scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._actors.append(make(bundle, self._variables, strategy))

    def _follow(self) -> End:
        """The first end that is no consequence of another one; else that of worker 0."""
        import ray

        waiting, causes, leaders = dict(self._running), [], []
        deadline = float("inf")
        while waiting and time.monotonic() < deadline:
            left = min(deadline - time.monotonic(), stall_reporter.PERIOD_SECS)
            for call in ray.wait(list(waiting), timeout=max(left, 0.0))[0]:
                end = end_of(call, waiting.pop(call))
                if end.kind == "done":
                    leaders += [end] if end.worker == 0 else []
                    continue
                causes.append(end)
                deadline = min(deadline, time.monotonic() + _SETTLE_SECS[end.kind])
        order = ("died", "raised", "lost")
        return min(causes, key=lambda end: order.index(end.kind)) if causes else leaders[0]

    def calls(self) -> list[Any]:
        """Of the function, where it runs."""
        return list(self._running)

    def stop(self) -> None:
        """Has the run end its round and save, as far as it has come."""
        import ray

        pid, node, *_ = self._places[0]
        send = ray.remote(lambda: os.kill(pid, signal.SIGTERM))
        send.options(num_cpus=0, scheduling_strategy=on_node(node)).remote()

    def kill(self) -> None:
        import ray
        from ray.util import remove_placement_group

        for actor in reversed(self._actors):  # process 0 last: the others need it to the end
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)


def make(bundle: dict[str, float], variables: dict[str, str], strategy: Any = "DEFAULT") -> Any:
    """A `Worker` with these resources, as soon as Ray has room for it."""
    import ray

    return (
        ray.remote(Worker)
        .options(
            **{name: bundle.get(key, 0) for key, name in _OPTIONS.items()},
            resources={key: n for key, n in bundle.items() if key not in _OPTIONS},
            runtime_env={"env_vars": variables},
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
    )


def on_node(node: str) -> Any:
    from ray.util import scheduling_strategies

    return scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def end_of(call: Any, worker: int) -> End:
    import ray

    try:
        kind, value = ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return End(worker, "raised", error)
    except ray.exceptions.RayError as error:
        return End(worker, "died", error, f"died: {shortly(error)}")
    return End(worker, kind, words=value) if kind == "lost" else End(worker, kind, value)


def shortly(error: Exception) -> str:
    """Of Ray's error, which has many lines, what says how the process ended."""
    line = str(error).splitlines()[-1].partition(" Some common causes")[0]
    return line.rpartition("Worker exit detail: ")[2].strip()[: exit_reports.MOST_CHARACTERS]
