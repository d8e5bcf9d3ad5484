"""What a run makes of its source: the stream of its microbatches, and the feed that brings them."""

import logging
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import ordering, placement, types
from hetjax.comm import broadcast_once, key_value_store
from hetjax.config import experiment, kinds
from hetjax.data import choosing, iterables, owned, sources, stream
from hetjax.data import feed as feed_lib
from hetjax.quota import policies

logger = logging.getLogger(__name__)

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
    config: experiment.ExperimentConfig, source: Any, chosen: kinds.Parts, *, leads: bool
) -> None:
    """Refuses what needs examples that come again, where they come once; tells of much padding.

    Raises:
        ValueError: the field, and what to set it to.
    """
    if config.microbatch_size > len(source) and leads:
        logger.warning(
            f"microbatch_size: {config.microbatch_size} examples, but the data has {len(source)}: "
            "the rest of each microbatch is padding, which is computed too"
        )
    if not isinstance(source, iterables.Streamed):
        return
    order, data = kinds.name_of("ordering", chosen.ordering), config.data
    if order != _DEFAULT:
        raise ValueError(f"ordering.method: got {order!r} {_ONCE}")
    if data.sharing == "private":
        raise ValueError(f"data.sharing: got 'private' {_ONCE}")
    if data.sharing == owned.LOCAL and data.weighting != "example":
        raise ValueError(f"data.weighting: got {data.weighting!r}; streams take 'example'")
    if data.feed == "resident" or data.readers != 1:
        raise ValueError(f"data: got feed={data.feed!r}, readers={data.readers!r} {_ONCE}")


def make_feed(
    config: experiment.ExperimentConfig,
    own: owned.Owned,
    where: placement.Placement,
    *,
    progress: bool,
) -> feed_lib.Feed:
    """As the configuration says, and as a few examples of the source show."""
    is_own = own.part is not None  # of which no other process can tell
    leads, is_alone = where.leads or is_own, is_own or len(where.own) == len(where.devices)
    board = None if is_alone else key_value_store.KeyValueStore("feed")
    feed = choosing.training_feed(
        own.source,
        where.places,
        asked=config.data.feed,
        num_readers=config.data.readers,
        leads=leads,
        agree=broadcast_once.BroadcastOnce(board, leads=leads),
        progress=progress and where.leads,
    )
    feed.own, feed.reads_all = own, feed.reads_all and not is_own
    return feed


def make_stream(
    config: experiment.ExperimentConfig,
    own: owned.Owned,
    where: placement.Placement,
    chosen: kinds.Parts,
    *,
    last: str,
) -> stream.Stream:
    """As the configuration says; names idle workers. A private shard always has a part."""
    common: dict[str, Any] = {
        "microbatch_size": config.microbatch_size,
        "ordering": chosen.ordering,
        "seed": config.seed,
        "last": last,
        "of_round": config.budget if config.data.last_round == "drop" else 0,
    }
    num_workers = config.cluster.num_workers
    if isinstance(own.source, iterables.Streamed):
        common |= {"ordering": AS_IT_COMES, "comes_once": True}
    if config.data.sharing == "shared":
        idle = num_workers - config.budget
        if idle > 0 and where.leads:
            logger.warning(
                f"budget: {config.budget} microbatches a round leave {idle} of {num_workers} "
                "workers idle"
            )
        return stream.SharedStream(own.num_examples, num_workers, **common)
    common["proportions"] = policies.shard_proportions(chosen.quota, num_workers)
    if own.part is not None:
        common["parts"] = list(zip(own.sizes, own.workers(where.devices), strict=True))
    return stream.PrivateStream(own.num_examples, num_workers, **common)


def first_examples(
    config: experiment.ExperimentConfig, source: Any, *, per_example_rng: bool
) -> tuple[types.PyTree, jax.Array]:
    """A microbatch, by which the loss and the order are tried, and its key or keys."""
    rng = jax.random.key(config.seed)
    ids = np.arange(config.microbatch_size) % len(source)
    first = sources.fetch(source, ids)
    feed_lib.check_narrow(first, ids)
    return first, jax.random.split(rng, config.microbatch_size) if per_example_rng else rng
