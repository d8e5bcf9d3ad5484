"""What a run makes of its source: the stream of its microbatches, and the feed that brings them."""

from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import mesh, messages, ordering, types
from hetjax.config import experiment as config_lib
from hetjax.config import kinds
from hetjax.data import choosing, iterables, sources
from hetjax.data import feed as feed_lib
from hetjax.data import stream as stream_lib
from hetjax.processes import board as board_lib
from hetjax.processes import solutions
from hetjax.quota import asking

_DEFAULT = "random_reshuffling"


class _Coming(NamedTuple):
    """The state of the order in which examples come."""

    order: np.ndarray  # i32[num_examples]: 0, 1, 2, …


def as_it_comes() -> ordering.Ordering:
    """Of what comes once: each pass in the order of its positions."""
    return ordering.Ordering(
        lambda num_examples, seed: _Coming(np.arange(num_examples, dtype=np.int32)),
        lambda state, realised_examples, example_signs: state,
    )


def check(config: config_lib.ExperimentConfig, source: Any, chosen: kinds.Parts) -> None:
    """Refuses what needs examples that come again, where they come once.

    Raises:
        ValueError: the field, and what to set it to.
    """
    if not isinstance(source, iterables.Streamed):
        return
    order = kinds.name_of("ordering", chosen.ordering)
    if order != _DEFAULT:
        raise ValueError(
            f"ordering.method: got {order!r} with a hetjax.stream, whose examples come once, so "
            "that no order can be made of what they did before. Leave it out: the order is that in "
            "which they come, shuffled in the buffer (buffer_size=)"
        )
    if config.data.sharing == "private":
        raise ValueError(
            "data.sharing: got 'private' with a hetjax.stream: no worker can own examples that "
            "nobody has seen yet. Take 'shared'"
        )
    if config.data.feed == "resident" or config.data.readers != 1:
        raise ValueError(
            f"data: got feed={config.data.feed!r} and readers={config.data.readers!r} with a "
            "hetjax.stream, which one thread reads ahead. Leave both out; a loader may have "
            "workers of its own"
        )


def make_feed(
    config: config_lib.ExperimentConfig, source: Any, where: mesh.Placement, *, progress: bool
) -> feed_lib.Feed:
    """As the configuration says, and as a few examples of the source show."""
    leads, is_alone = where.leads, len(where.own) == len(where.devices)
    return choosing.training_feed(
        source,
        where.devices,
        asked=config.data.feed,
        num_readers=config.data.readers,
        leads=leads,
        agree=solutions.Solutions(leads=leads, board=None if is_alone else board_lib.Board("feed")),
        progress=progress and leads,
    )


def make_stream(
    config: config_lib.ExperimentConfig,
    source: Any,
    chosen: kinds.Parts,
    *,
    last: str,
    leads: bool,
) -> stream_lib.Stream:
    """As the configuration says; tells who has nothing to do. A private shard always has a part."""
    common: dict[str, Any] = {
        "microbatch_size": config.microbatch_size,
        "ordering": chosen.ordering,
        "seed": config.seed,
        "last": last,
    }
    num_workers = config.cluster.num_workers
    if config.data.sharing == "shared":
        idle = num_workers - config.budget
        if idle > 0 and leads:
            messages.say(
                f"a round has {config.budget} microbatches (budget) for {num_workers} "
                f"workers, so {idle} of them have nothing to do in it; set budget to "
                f"{num_workers} or more for all to work"
            )
        if isinstance(source, iterables.Streamed):
            common |= {"ordering": as_it_comes(), "comes_once": True}
        return stream_lib.SharedStream(len(source), num_workers, **common)
    proportions = asking.proportions(chosen.quota, num_workers)
    return stream_lib.PrivateStream(len(source), num_workers, proportions=proportions, **common)


def end(
    feed: feed_lib.Feed, stream: stream_lib.Stream, state: stream_lib.StreamState, budget: int
) -> str:
    """Where an iterable has ended within an epoch, and all that came is done: what to tell.

    The next round of `budget` microbatches is waited for; a stream that is shorter is cut.
    """
    if not (feed.reads_all and isinstance(stream, stream_lib.SharedStream)):
        return ""
    (own,), quotas = state.passes, np.zeros(stream.num_workers, int)
    quotas[0] = stream.total(state, budget)
    ids = stream.plan(state, quotas).example_ids
    came = feed.came(own.pass_index, int(ids.max(initial=-1)) + 1)
    stream.cut(stream.num_examples if came is None else came)
    return feed.ended(own.pass_index) if stream.total(state, budget) == 0 else ""


def first_examples(
    config: config_lib.ExperimentConfig, source: Any, *, per_example_rng: bool
) -> tuple[types.PyTree, jax.Array]:
    """A microbatch, by which the loss and the order are tried, and its key or keys."""
    rng = jax.random.key(config.seed)
    ids = np.arange(config.microbatch_size) % len(source)
    first = sources.fetch(source, ids)
    feed_lib.check_narrow(first, ids)
    return first, jax.random.split(rng, config.microbatch_size) if per_example_rng else rng
