"""`launch`: a function in one actor for each worker, all started anew when a process is lost."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax import extras, parts
from hetjax.ray import actors

logger = logging.getLogger(__name__)


def launch(
    train_fn: Callable[[], Any],
    resources: Sequence[Mapping[str, float]],
    *,
    max_failures: int = 3,
    start_secs: float = 300.0,
) -> Any:
    """Runs a function in one actor of Ray for each worker, as the processes of one run.

    The actors have joined each other when the function is called, in the main thread of its
    process, so SIGTERM ends a run of `hetjax.fit` between two rounds, saved. When a process or a
    node is lost all are ended and start anew, with another port, as soon as the cluster has room
    for all of them. `fit` goes on from the last checkpoint in its workdir, which all nodes see.

    Args:
        train_fn: called without arguments in each actor; `functools.partial` gives it some.
        resources: of each worker, [num_workers]: what Ray's cluster counts, `"CPU"`, `"GPU"`,
            `"memory"` in bytes, or a resource of your own. Worker 0 is process 0 of the run.
        max_failures: how often all may start anew, from 0.
        start_secs: how long the cluster may take to have room for all, in seconds.

    Returns:
        What `train_fn` returned in worker 0. A result of `hetjax.fit` comes as a `SavedRun`,
        without the state of all workers.

    Raises:
        ModuleNotFoundError: Ray is missing; says how to get it.
        ValueError: the resources are none, the cluster has no room for them, or some workers have
            an accelerator and others none.
        RuntimeError: a process was lost once more than `max_failures`.
        KeyboardInterrupt: after Ctrl-C; the run has ended its round and saved. A second Ctrl-C
            ends all at once.
        Exception: what `train_fn` raised in one worker, with its traceback there. It is not tried
            again.

    Example:
        >>> def train():  # doctest: +SKIP
        ...     return hetjax.fit(loss, params, optimizer, data, workdir="/shared/run")
        >>> hetjax.ray.launch(train, resources=[{"GPU": 1}, {"GPU": 0.5}])  # doctest: +SKIP
    """
    bundles = _checked(resources, max_failures)
    extras.require("ray", extra="ray")
    for attempt in range(max_failures + 1):
        workers = actors.Workers(bundles, attempt, start_secs)
        try:
            end = workers.run(train_fn)
        except KeyboardInterrupt:
            workers.stop()
            raise
        finally:
            workers.kill()
        if end.kind == "done":
            return end.value
        if end.kind == "raised":
            raise end.value
        said = f"worker {end.worker} {end.words}"
        if attempt < max_failures:
            more = f"all start anew from the last checkpoint ({attempt + 1} of {max_failures})"
            logger.warning(f"{said}; {more}")
    raise RuntimeError(
        f"launch: {said}; no restart is left of max_failures={max_failures}"
    ) from end.value


def _checked(resources: Any, max_failures: Any) -> list[dict[str, float]]:
    def is_bundle(each: Any) -> bool:
        return isinstance(each, Mapping) and any(amount > 0 for amount in each.values())

    if not isinstance(resources, Sequence) or not resources or not all(map(is_bundle, resources)):
        raise ValueError(
            f"launch: resources are {resources!r}; give one dict for each worker, such as "
            "[{'GPU': 1}, {'GPU': 0.5}]"
        )
    parts.integer().check("launch: max_failures", max_failures)
    return [{name: amount for name, amount in each.items() if amount} for each in resources]
