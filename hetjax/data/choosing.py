"""Which feed a run takes, and what its user is told of it."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from hetjax import memory, mesh, starting
from hetjax.comm import join
from hetjax.data import feed, iterable_feed, iterables, readers, sources, trial
from hetjax.data import held as held_lib
from hetjax.report import words

logger = logging.getLogger(__name__)

_STREAM = "data.feed='streamed' reads them in each pass"

AUTO = "auto"  # 'resident', unless the source changes what it gives
_BAR_AFTER_SECS = 1.0
_SHARE = 0.75  # of the free memory, that examples may take: the model needs some, too

Agree = Callable[[str, Callable[[], list[float]]], list[float]]
"""`(problem, solve) -> numbers`: one process solves, and all get its numbers."""


def training_feed(
    source: Any,
    places: Sequence[mesh.Place],
    *,
    asked: str,
    num_readers: int | str,
    leads: bool,
    agree: Agree,
    progress: bool = False,
) -> feed.Feed:
    """The feed of a run; unless it is to be streamed, a few examples are read twice before.

    Args:
        source: a data source.
        places: of each worker.
        asked: 'auto', 'resident' or 'streamed', as `data.feed`.
        num_readers: threads that read, or 'processes:N', as `data.readers`.
        leads: whether this process tells the user.
        agree: makes all processes take the same feed.
        progress: show a bar if a resident set takes long to read.

    Raises:
        ValueError: an example cannot be read, or the source cannot be read by so many threads.
    """
    if isinstance(source, iterables.Streamed):
        return iterable_feed.IterableFeed(source, places, leads=leads)
    crew = _crew(source, num_readers)
    look = functools.cache(lambda: trial.look(source))

    def changes() -> list[float]:
        changing = look().difference is not None or sources.knows_epochs(source)
        return [float(changing or bool(_too_large(source, look(), places)))]

    is_streamed = asked == "streamed" or (asked == AUTO and agree("source-changes", changes)[0] > 0)
    held = None
    if leads:
        values = False
        if asked != "streamed":
            found, large = look(), _too_large(source, look(), places)
            for line in _lines(source, found, asked=asked, crew=crew, large=large):
                logger.info(line)
            values = found.difference is None and not is_streamed
        held = held_lib.Held(source, name="the source", values=values, way=_STREAM)
    if is_streamed:
        return feed.StreamedFeed(source, places, crew=crew, held=held)
    with _bar(len(source), "reading the source", shown=progress) as bar:
        return feed.ResidentFeed(source, places, crew=crew, on_read=bar.update, held=held)


def evaluation_feed(
    source: Any, place: mesh.Place, *, num_readers: int | str = 1, progress: bool = False
) -> feed.Feed:
    """The examples of an evaluation, in their place. Tells the user if the source changes them.

    Args:
        source: a data source; read once, as a whole, where there is memory for it.
        place: of the evaluation.
        num_readers: as of `training_feed`.
        progress: show a bar if that takes long.

    Raises:
        ValueError: as of `training_feed`.
    """
    if isinstance(source, iterables.Streamed):
        raise ValueError("eval_source: got a hetjax.stream, whose examples come once; give a list")
    crew = _crew(source, num_readers)
    found = trial.look(source)
    is_steady = found.difference is None
    if found.difference is not None:
        logger.warning(f"eval_source: {_changed(source, found.difference)}. It is read once.")
    if sources.knows_epochs(source):
        name = type(source).__name__
        logger.info(f"eval_source: {name} changes by epoch; every evaluation has the first.")
    large = _too_large(source, found, [place])
    if large and is_steady:
        logger.info(f"eval_source: {large}. Each evaluation reads it anew.")
        return feed.StreamedFeed(source, [place], crew=crew)
    way = "All evaluations have them"
    held = held_lib.Held(source, name="the eval_source", values=is_steady, way=way)
    with _bar(len(source), "reading the eval_source", shown=progress) as bar:
        return feed.ResidentFeed(source, [place], crew=crew, on_read=bar.update, held=held)


def _crew(source: Any, num_readers: int | str) -> readers.Crew:
    """Who reads; several threads only what does not say that one has to."""
    crew = readers.asked(num_readers)  # copies of processes need not be thread-safe
    if crew.size > 1 and not crew.processes and getattr(source, "thread_safe", None) is False:
        name = type(source).__name__
        raise ValueError(f"data.readers: got {num_readers}, but {name} says thread_safe = False")
    return crew


def _too_large(source: Any, found: trial.Trial, places: Sequence[mesh.Place]) -> str:
    """Why the examples cannot be kept in memory, in words; '' where they can, as far as is known.

    On CPUs each device has a copy, beside the one that is read.
    """
    size = found.example_bytes * len(source)
    of_all = (device for place in places for device in mesh.devices_at(place))
    own = {device for device in of_all if device.process_index == jax.process_index()}
    copies = 1 + sum(device.platform == "cpu" for device in own)
    if (of_machine := memory.free_bytes()) is not None:
        of_machine //= max(len(join.own_machine()), 1)
    for needed, free, where in (
        (copies * size, of_machine, "memory"),
        *[(size, _free_on(device), f"memory of {device}") for device in own],
    ):
        if free is not None and needed > _SHARE * free:
            more = "" if needed == size else f" ({words.size(needed)} with a copy a device)"
            return (
                f"the {len(source):,} examples of {type(source).__name__} take about "
                f"{words.size(size)}{more}, and {words.size(free)} of {where} are free"
            )
    return ""


def _free_on(device: jax.Device) -> int | None:
    """Bytes of its own memory that are free; None: it has none, or does not say."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _changed(source: Any, difference: trial.Difference) -> str:
    return (
        f"example {difference.example_id} of {type(source).__name__} was another one when it was "
        f"read again ({difference.field or 'the item'} differed)"
    )


def _lines(
    source: Any, found: trial.Trial, *, asked: str, crew: readers.Crew, large: str
) -> Iterator[str]:
    """What the user is told of what the trial found."""
    name, draws = type(source).__name__, found.difference is not None
    changed = "" if found.difference is None else _changed(source, found.difference)
    if crew.processes and draws:
        yield (
            f"{crew.size} processes read copies of {name}, which draw the same random numbers; "
            "hetjax.augmented(source, f) gives f a generator for each example and epoch"
        )
    if large and asked == "resident":
        yield f"{large}; data.feed='streamed' reads ahead"
    if sources.knows_epochs(source):
        if asked == "resident":
            yield f"{name} changes by epoch, and data.feed='resident' keeps the first; {_STREAM}"
        if draws:
            yield f"{changed} within one epoch, so that no run can be repeated"
    elif draws and asked == "resident":
        yield f"{changed}, and data.feed='resident' keeps the first values; {_STREAM}"
    elif asked == AUTO and (draws or large):
        yield f"{changed or large}. So the feed is 'streamed'; data.feed='resident' reads once"
        if draws and crew.size > 1 and not crew.processes:
            yield f"{crew.size} threads read {name}, whose random numbers depend on which is first"


def _bar(total: int, title: str, *, shown: bool) -> contextlib.AbstractContextManager[Any]:
    """A bar that appears after a second and goes when all is read."""
    options = {"unit": "ex", "unit_scale": True, "delay": _BAR_AFTER_SECS, "leave": False}
    return starting.bar(total=total, desc=title, disable=not shown, **options)
