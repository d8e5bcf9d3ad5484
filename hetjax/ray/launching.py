"""`launch`: a function in one actor for each worker, all started anew when a process is lost."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax import extras, parts
from hetjax.ray import actors, joining
from hetjax.ray import elastic as elastic_lib

logger = logging.getLogger(__name__)

_SAVING_SECS = 60.0  # to end the round and save after Ctrl-C


def launch(
    train_fn: Callable[[], Any],
    resources: Sequence[Mapping[str, float]],
    *,
    elastic: bool = False,
    min_workers: int = 1,
    max_failures: int = 3,
    start_secs: float = 300.0,
    late_secs: float | None = None,
) -> Any:
    """Runs a function in one actor of Ray for each worker, as the processes of one run.

    The function is called in the main thread of its process. `fit` in it goes into the run, and
    goes on from the last checkpoint in its workdir, which all nodes see.

    Without `elastic` the actors have joined each other when the function is called. When a process
    or a node is lost all are ended and start anew, with another port, as soon as the cluster has
    room for all of them. SIGTERM to one ends the run between two rounds, saved; all start anew.

    With `elastic` workers come and go, and the run goes on. Each dict of `resources` is a seat. The
    seats for which Ray has room within `start_secs` begin the run, and others join as soon as a
    machine comes. A seat whose worker has ended is taken again where there is room. Each worker has
    a JAX of its own, so kinds of devices may differ.

    - A worker that dies, or is late, has not contributed to the round; the others do its part.
    - A worker leaves after its round by SIGTERM, or when its node is drained. The last one ends the
      run, saved, and all start anew where there is room. A node that is stopped at once
      (`ray stop`) leaves at once; the others do its part.
    - When no worker with the state is left all start anew from the last checkpoint.
    - A worker whose function returns without a `fit` is not waited for. Where that is the first
      worker, and another one calls `fit`, the run ends with an error.
    - A worker that does not see the leader's workdir is refused by name.
    - Without Ray's head for 20 s the run ends, saved; the same call goes on from there.

    Args:
        train_fn: called without arguments in each actor; `functools.partial` gives it some.
        resources: of each worker, [num_workers]: what Ray's cluster counts, `"CPU"`, `"GPU"`,
            `"memory"` in bytes, or a resource of your own. Worker 0 is process 0 of the run.
        elastic: workers come and go.
        min_workers: with how many an elastic run begins at least, from 1 to all.
        max_failures: how often all may start anew, from 0. Elastic: how many deaths are followed
            by a new start, of one worker or of all. Then seats stay empty, and the others go on. A
            worker that leaves does not count.
        start_secs: how long the cluster may take to have room for all, in seconds.
        late_secs: elastic: how long the others wait at least for a worker that makes no progress,
            in seconds. None: `HETJAX_LATE_SECS`, or 10.

    Returns:
        What `train_fn` returned in worker 0; elastic: in the worker that led at the end, or where
        that is lost in another one. Where no worker has returned, all start anew. A result of
        `hetjax.fit` comes as a `SavedRun`, without the state of all workers.

    Raises:
        ModuleNotFoundError: Ray is missing; says how to get it.
        ValueError: an argument is wrong, the cluster has no room for the resources (elastic: for
            `min_workers`), or, unless elastic, some workers have an accelerator and others none.
        RuntimeError: a process was lost once more than `max_failures`; elastic: and none is left,
            or the run has lost Ray's head or its referee.
        KeyboardInterrupt: after Ctrl-C; the run has ended its round and saved. A second Ctrl-C
            ends all at once.
        Exception: what `train_fn` raised in one worker, with its traceback there. It is not tried
            again. Elastic: it counts as a death instead where it is likely of one machine: an
            OSError, a MemoryError, no memory of a device, or anything from a worker that comes to
            a run that goes on.

    Example:
        >>> def train():  # doctest: +SKIP
        ...     return hetjax.fit(loss, params, optimizer, data, workdir="/shared/run")
        >>> hetjax.ray.launch(train, resources=[{"GPU": 1}, {"GPU": 0.5}])  # doctest: +SKIP
    """
    bundles = _checked(resources, elastic, min_workers, max_failures, late_secs)
    extras.require("ray", extra="ray")
    import ray

    joining.connect()
    attempt, left = 0, max_failures
    while True:
        run: Any = actors.Workers(train_fn, bundles, attempt, start_secs)
        if elastic:
            limits = min_workers, left, start_secs, late_secs
            run = elastic_lib.ElasticRun(train_fn, bundles, attempt, *limits)
        try:
            ended = run.run()
        except KeyboardInterrupt:
            if calls := run.calls():
                logger.info("Ctrl-C: ending after this round; once more to stop at once")
                run.stop()
                ray.wait(calls, num_returns=len(calls), timeout=_SAVING_SECS)
            raise
        finally:
            run.kill()
        attempt, left = attempt + 1, left - run.failures
        if not ended.is_lost or left < 0:
            break
        anew = f"all start anew from the last checkpoint ({max_failures - left} of {max_failures})"
        logger.warning(f"{ended.words}; {anew}")
    if ended.words:
        if sys.excepthook.__module__.startswith("ray."):
            sys.excepthook = sys.__excepthook__  # Ray's own asks the head first, for a minute
        more = f"; no restart is left of max_failures={max_failures}" if ended.is_lost else ""
        raise RuntimeError(f"launch: {ended.words}{more}") from ended.error
    if ended.error is not None:
        raise ended.error
    return ended.value


def _checked(
    resources: Any, elastic: bool, min_workers: Any, max_failures: Any, late_secs: Any
) -> list[dict[str, float]]:
    def is_bundle(each: Any) -> bool:
        return isinstance(each, Mapping) and any(amount > 0 for amount in each.values())

    if not isinstance(resources, Sequence) or not resources or not all(map(is_bundle, resources)):
        raise ValueError(
            f"launch: resources are {resources!r}; give one dict for each worker, such as "
            "[{'GPU': 1}, {'GPU': 0.5}]"
        )
    parts.integer().check("launch: max_failures", max_failures)
    parts.integer(at_least=1, at_most=len(resources)).check("launch: min_workers", min_workers)
    if late_secs is not None:
        parts.number(above=0).check("launch: late_secs", late_secs)
    if not elastic and (min_workers != 1 or late_secs is not None):
        raise ValueError("launch: min_workers and late_secs need elastic=True")
    return [{name: amount for name, amount in each.items() if amount} for each in resources]
