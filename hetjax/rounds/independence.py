"""Do the examples of a microbatch see each other? The run's own programs tell, before its rounds.

A quota divides a batch into microbatches. So a loss of one example that looks at others (negatives
of a contrastive loss, statistics of a batch) sees those of its microbatch alone. Padding, and what
fills a microbatch up, counts nowhere. So what a worker adds up over some examples is the same
beside others and beside copies of one, unless they see each other.
"""

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.data import feed as feed_lib
from hetjax.data import passes, sources, stream
from hetjax.local import gradients, packing, stepped
from hetjax.rounds import setup as setup_lib

logger = logging.getLogger(__name__)

_SLOW_SECS = 1.0  # above which a user is told how long the check took
_RTOL, _ATOL = 1e-3, 1e-5  # the second over the norm of the whole gradient
_LARGE_BYTES = 64 << 20  # of a model of which a microbatch takes long
_ALONE = "rule: it takes each example by itself", "hetjax.per_example"
_SAMPLE = 1024  # examples among which the rare ones are looked for
_MOST_NUMBERS = 4096  # of a leaf that may tell how long an example is


class _First(feed_lib.ResidentFeed):
    """Of the first examples, where others cannot be had, or not twice."""

    lend = feed_lib.ResidentFeed.load  # type: ignore[assignment]


def check(
    setup: setup_lib.Setup, own: setup_lib.Programs, shared: types.Shared, kept: types.Kept
) -> None:
    """Computes some microbatches twice; all processes call it. Nothing is changed.

    A worker has four: two drawn over the data, two of its rare examples; each second one at the
    parameters as they are, the others where these were moved at random. Of a large model the first
    worker alone looks, at one of the last.

    Args:
        setup: of the run.
        own: programs that have run.
        shared, kept: what the workers are given, and what they keep.

    Raises:
        ValueError: the examples see each other, and `loss_over='example'`, or the rule takes each
            by itself.
    """
    if setup.looks_at is None:
        return
    own, is_needed = setup.programs.plain or own, setup.programs.plain is not None
    why, way = _ALONE if is_needed else ("loss_over='example'", "loss_over='microbatch'")
    began, where = time.perf_counter(), setup.where
    rows = mesh_lib.add_worker_axis(moved(mesh_lib.own_row(shared.params)), where.num_rows)
    points = where.place(rows), shared.params
    keys = stepped.pass_keys(setup.rng, where)
    feed, drawn = _drawn(setup, *setup.looks_at)
    starts = np.arange(len(where.devices) + 1)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (rows, setup.by_name.frozen)]
    if sizes[0] / where.num_rows + sizes[1] > _LARGE_BYTES:
        starts, drawn = starts.clip(max=1), drawn[2:3, :1]

    def added_up(example_ids: np.ndarray, params: types.PyTree) -> list[np.ndarray]:
        assigned = stream.Assignment(example_ids, starts, 0 * starts[1:])
        plan = stepped.LocalPlan(None, assigned, assigned.quotas, feed, may_close=False)
        carried = own.begin(params, kept, shared.given)
        at = shared._replace(params=params)
        found, done = own.local.run(plan, at, carried, keys(assigned.passes))
        done()
        return _sums(found)

    seen = ""
    for index, ids in enumerate(drawn):
        beside = ids, np.where(ids < 0, stream.PADDING, ids)
        seen = _difference(*(added_up(each, points[index % 2]) for each in beside)) or seen
    secs = time.perf_counter() - began
    if secs > _SLOW_SECS and where.leads:
        logger.info(f"the check of the loss took {secs:.1f} s; {way} has none")
    size = setup.config.microbatch_size
    told = (
        f"the examples of a microbatch see each other, and none outside: {seen}. "
        "hetjax.batch_loss compares those of a round. "
        f"Not meant? Shapes [{size}, 1] and [{size}] together are [{size}, {size}]"
    )
    if seen and (is_needed or setup.config.loss_over == "example"):
        raise ValueError(f"{why}: {told}")
    if seen and where.leads:
        logger.warning(f"{told}. loss_over='microbatch' allows it")


def _drawn(setup: setup_lib.Setup, source: Any, first: types.PyTree) -> tuple[Any, np.ndarray]:
    """The feed, and i32[4, W, B]: ids that count, others that fill up.

    The first of a microbatch always counts, since the microbatch's key is made of it.
    """
    rng, size = np.random.default_rng(0), setup.config.microbatch_size
    feed, some = setup.feed, rng.choice(len(source), min(len(source), _SAMPLE), replace=False)
    if setup.feed.reads_ahead:
        feed, some = _First(sources.ArraySource(first), setup.where.places), np.arange(size)
    rare = some[np.argsort(-_rarity(source, some), kind="stable")[: 2 * size]]
    ids = np.array(
        [
            [rng.choice(pool, size, replace=len(pool) < size) for _ in setup.where.devices]
            for pool in (some, some, rare, rare)
        ],
        np.int32,
    )
    counts = rng.random(ids.shape) < 0.5
    counts[..., 0], counts[..., -1] = True, False
    ids += feed.own.first
    return feed, np.where(counts, ids, passes.filling(ids))


def _rarity(source: Any, ids: np.ndarray) -> np.ndarray:
    """f[k]: how rare the rarest value or length of each of these examples is among them."""
    found = np.zeros(len(ids))
    arrays = source.arrays if isinstance(source, sources.ArraySource) else ()
    for leaf in jax.tree.leaves(arrays):
        if leaf.size <= _MOST_NUMBERS * len(leaf):
            numbers = leaf[ids].reshape(len(ids), -1)
            keys = numbers[:, 0] if numbers.shape[1] == 1 else np.count_nonzero(numbers, axis=1)
            _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
            if 2 * len(counts) <= len(ids):  # else it is a measurement: no kind, no length
                found = np.maximum(found, 1 / counts[places])
    return found


def _sums(found: Any) -> list[np.ndarray]:
    """What is compared, f[W, n] each: gradients, then losses and weights; NaN where one of these is
    not finite."""

    def on_host(leaf: jax.Array) -> np.ndarray:
        return np.concatenate([np.asarray(row) for row in mesh_lib.worker_rows(leaf)])

    found = packing.unpack(jax.tree.map(on_host, found))
    sums, is_finite = found.sums, found.tally.nonfinite_microbatch < 0
    compared = sums, getattr(found, "loss_sum", None), getattr(found, "weight", None)
    if isinstance(sums, gradients.GradientSums):  # which the synchronisation is to finish
        compared = sums.grad_sum, sums.loss_sum, sums.weight_sum
    leaves = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(compared)]
    return [*leaves[:-1], np.where(is_finite[:, None], leaves[-1], np.nan)]


def _difference(leaves: list[np.ndarray], others: list[np.ndarray]) -> str:
    """How sums over the same examples differ, of one worker; '' where that is rounding."""

    def norms(leaves: Any) -> np.ndarray:
        return np.array([np.linalg.norm(leaf, axis=1) for leaf in leaves])

    changes = norms(map(np.subtract, leaves, others))
    sizes = np.maximum(norms(leaves), norms(others))
    whole = np.linalg.norm(sizes[:-2], axis=0)
    rounding = _RTOL * sizes
    rounding[:-2] += _ATOL * whole
    differs = np.any(changes > rounding, axis=0) & np.isfinite(sizes[-1])
    if not differs.any():
        return ""
    worker = int(np.argmax(np.where(differs, changes[-2], -1)))
    means = [float(each[-2][worker, 0] / each[-1][worker, 0]) for each in (leaves, others)]
    share = np.linalg.norm(changes[:-2, worker]) / whole[worker]
    return (
        f"loss_fn gives some the loss {means[0]:.6g} beside others and {means[1]:.6g} beside "
        f"copies of one example, and gradients that differ by {share:.1%}"
    )


def moved(params: types.PyTree) -> types.PyTree:
    """Each leaf moved at random, by about its own size, or 0.1 if it is smaller; on the host.

    As a program it would take longer to compile than the loss does.
    """
    rng = np.random.default_rng(0)

    def move(leaf: Any) -> np.ndarray:
        wide = np.asarray(leaf, np.float32)
        scale = max(float(np.sqrt(np.mean(np.square(wide)))), 0.1)
        return (wide + scale * rng.standard_normal(wide.shape)).astype(jnp.result_type(leaf))

    return jax.tree.map(move, params)
