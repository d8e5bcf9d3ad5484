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
from hetjax.quota import policies

_DEFAULT = "random_reshuffling"
_ONCE = "with a hetjax.stream, whose examples come once, in their own order; leave it out"


class _Coming(NamedTuple):
    """The state of the order in which examples come."""

    order: np.ndarray  # i32[num_examples]: 0, 1, 2, …


AS_IT_COMES = ordering.Ordering(
    lambda num_examples, seed: _Coming(np.arange(num_examples, dtype=np.int32)),
    lambda state, realised_examples, example_signs: state,
)


def check(
    config: config_lib.ExperimentConfig, source: Any, chosen: kinds.Parts, *, leads: bool
) -> None:
    """Refuses what needs examples that come again, where they come once; tells of much padding.

    Raises:
        ValueError: the field, and what to set it to.
    """
    if config.microbatch_size > len(source) and leads:
        messages.say(
            f"microbatch_size: {config.microbatch_size} examples, but the data has {len(source)}: "
            "the rest of each microbatch is padding, which is computed too"
        )
    if not isinstance(source, iterables.Streamed):
        return
    order = kinds.name_of("ordering", chosen.ordering)
    if order != _DEFAULT:
        raise ValueError(f"ordering.method: got {order!r} {_ONCE}")
    if config.data.sharing == "private":
        raise ValueError(f"data.sharing: got 'private' {_ONCE}")
    if config.data.feed == "resident" or config.data.readers != 1:
        asked = f"feed={config.data.feed!r}, readers={config.data.readers!r}"
        raise ValueError(f"data: got {asked} {_ONCE}")


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
        "of_round": config.budget if config.data.last_round == "drop" else 0,
    }
    num_workers = config.cluster.num_workers
    if config.data.sharing == "shared":
        idle = num_workers - config.budget
        if idle > 0 and leads:
            messages.say(
                f"budget: {config.budget} microbatches a round leave {idle} of {num_workers} "
                "workers idle"
            )
        if isinstance(source, iterables.Streamed):
            common |= {"ordering": AS_IT_COMES, "comes_once": True}
        return stream_lib.SharedStream(len(source), num_workers, **common)
    proportions = policies.shard_proportions(chosen.quota, num_workers)
    return stream_lib.PrivateStream(len(source), num_workers, proportions=proportions, **common)


def first_examples(
    config: config_lib.ExperimentConfig, source: Any, *, per_example_rng: bool
) -> tuple[types.PyTree, jax.Array]:
    """A microbatch, by which the loss and the order are tried, and its key or keys."""
    rng = jax.random.key(config.seed)
    ids = np.arange(config.microbatch_size) % len(source)
    first = sources.fetch(source, ids)
    feed_lib.check_narrow(first, ids)
    return first, jax.random.split(rng, config.microbatch_size) if per_example_rng else rng
