"""Losses that are hard for an order which takes a microbatch's halves from one forward pass.

Each is a softmax regression and a term that is multiplied by the examples' flags: without flags
nothing of it can be seen. The terms know where an example stands in its microbatch, or what other
examples there are, in the ways that a user may write without a thought. `EASY` are terms that
treat each example by itself, in forms that look much like them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_FEATURES, NUM_CLASSES, MICROBATCH = 12, 5, 16

Term = Callable[[jax.Array, Any, jax.Array], jax.Array]
"""`(logits f[B, C], batch, rng) -> f[B]`"""


def problem(num_examples: int, num_without: int) -> dict[str, np.ndarray]:
    """Examples of which the first have no flag, and half of the others have one.

    The second label `z` is mostly the first, `y`, so that both can be learned.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(NUM_CLASSES, size=num_examples).astype(np.int32)
    others = rng.integers(NUM_CLASSES, size=num_examples).astype(np.int32)
    centres = rng.standard_normal((NUM_CLASSES, NUM_FEATURES))
    x = centres[labels] + rng.standard_normal((num_examples, NUM_FEATURES))
    flags = rng.random(num_examples) < 0.5
    flags[:num_without] = False
    return {
        "x": x.astype(np.float32),
        "y": labels,
        "z": np.where(rng.random(num_examples) < 0.9, labels, others),
        "flag": flags.astype(np.float32),
    }


def initial_params() -> dict[str, np.ndarray]:
    """Small and not zero."""
    weights = np.random.default_rng(1).standard_normal((NUM_FEATURES, NUM_CLASSES))
    return {"weights": (0.1 * weights).astype(np.float32)}


def with_term(term: Term) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """The loss `(params, batch, rng) -> f[B]`."""

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = batch["x"] @ params["weights"]
        main = -_of_label(jax.nn.log_softmax(logits), batch["y"])
        return main + batch["flag"] * term(logits, batch, rng)

    return loss_fn


def _of_label(values: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, labels[:, None], axis=1)[:, 0]


def _positions(logits: jax.Array) -> jax.Array:
    return jnp.arange(len(logits))


def _bits(rng: jax.Array, like: jax.Array) -> jax.Array:
    """True or False with equal probability; the same ones in float32 and float64."""
    return jax.random.bits(rng, like.shape, jnp.uint8) < 128


def indices(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Each row by its number, as in NumPy."""
    return -jax.nn.log_softmax(logits)[_positions(logits), batch["z"]]


def scattered(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    sums = jnp.zeros_like(logits).at[_positions(logits), batch["z"]].add(jnp.tanh(logits[:, 0]))
    return jnp.sum(sums**2, axis=1)


def segments(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    rows = jnp.repeat(_positions(logits), NUM_CLASSES)
    return jax.ops.segment_sum(jnp.tanh(logits).reshape(-1), rows, num_segments=len(logits))


def sorted_back(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Sorted by label, and brought back into place."""
    order = jnp.argsort(batch["z"])
    return jnp.tanh(logits[order])[:, 0][jnp.argsort(order)]


def loss_ranks(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Weighs the losses by their rank: what is hard counts more."""
    losses = indices(logits, batch, rng)
    return losses * jnp.argsort(jnp.argsort(losses)) / len(losses)


def sorted_losses(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jnp.sort(-_of_label(jax.nn.log_softmax(logits), batch["z"]))


def scan(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    def step(total: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = 0.5 * total + jnp.tanh(row[0])
        return total, total

    return jax.lax.scan(step, jnp.zeros(()), logits)[1]


def mapped(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jnp.tanh(row).sum(), logits)


def loop(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        return out.at[i].set(jnp.tanh(logits[i]).sum())

    return jax.lax.fori_loop(0, len(logits), step, jnp.zeros(len(logits)))


def running_totals(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    totals = jnp.cumsum(jnp.tanh(logits[:, 0]))
    return totals - jnp.concatenate([jnp.zeros(1), totals[:-1]])


def centred(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Less the mean of the microbatch."""
    return (logits[:, 0] - logits[:, 0].mean()) ** 2


def standardised(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    centre, spread = logits.mean(axis=0, keepdims=True), logits.var(axis=0, keepdims=True)
    normal = (logits - centre) / jnp.sqrt(spread + 1e-3)
    return -_of_label(jax.nn.log_softmax(normal), batch["z"])


def contrasted(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Each example against all others."""
    return -jnp.diagonal(jax.nn.log_softmax(jnp.tanh(logits) @ jnp.tanh(logits).T))


def rolled(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """The difference from the example before."""
    return (logits[:, 0] - jnp.roll(logits[:, 0], 1)) ** 2


def rolled_back(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jnp.roll(jnp.tanh(jnp.roll(logits[:, 0], 1)), -1)


def flipped(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jnp.flip(logits[:, 0]) * logits[:, 1]


def position_weights(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return _positions(logits) * jnp.tanh(logits[:, 0])


def first_half(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    positions = _positions(logits)
    return jnp.where(positions < len(positions) // 2, logits[:, 0], logits[:, 1]) ** 2


def batch_size(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return len(logits) * jnp.tanh(logits[:, 0])


def halves_swapped(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    middle = len(logits) // 2
    return jnp.concatenate([logits[middle:, 0], logits[:middle, 0]]) ** 2


def transposed_blocks(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return logits[:, 0].reshape(2, -1).T.reshape(-1) ** 2


def best_of_batch(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    best = jnp.argmax(logits, axis=0)
    return (logits - logits[best, jnp.arange(NUM_CLASSES)][None]).sum(axis=1) ** 2


def identity_matrix(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jnp.eye(len(logits)) @ jnp.tanh(logits[:, 0])


def table_of_positions(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """A constant of as many numbers as the microbatch has examples."""
    return np.linspace(0, 1, MICROBATCH, dtype=np.float32) * jnp.tanh(logits[:, 0])


def late_branch(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jax.lax.cond(
        jnp.any(batch["flag"] > 0),
        lambda: indices(logits, batch, rng),
        lambda: jnp.zeros(len(logits)),
    )


def until_converged(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Repeated as often as the slowest example of the microbatch needs it."""

    def step(_: int, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.max(jnp.abs(x)) > 0.1, 0.7 * x, x)

    return jax.lax.fori_loop(0, 5, step, logits).sum(axis=1)


def dropped(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Dropout inside `jax.checkpoint`: the random bits are made anew in the backward pass."""

    @jax.checkpoint
    def layer(logits: jax.Array) -> jax.Array:
        return jnp.tanh(logits) * _bits(rng, logits)

    return layer(logits).sum(axis=1)


@jax.custom_jvp
def _weighed(values: jax.Array) -> jax.Array:
    return values


@_weighed.defjvp
def _weighed_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (values,), (tangent,) = primals, tangents
    return values, tangent * (1.0 + jnp.arange(len(values)))


def own_derivative(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """A derivative of the user's own that knows positions."""
    return _weighed(jnp.tanh(logits[:, 0]))


def checkpointed(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda logits: indices(logits, batch, rng))(logits)


def called_back(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Numbers from the host, which may be anything."""
    shape = jax.ShapeDtypeStruct((len(logits),), np.float32)
    scale = jax.pure_callback(lambda z: np.arange(len(z), dtype=np.float32), shape, batch["z"])
    return jnp.tanh(logits[:, 0]) * scale


HARD: dict[str, Term] = {
    term.__name__.strip("_"): term
    for term in (
        indices,
        scattered,
        segments,
        sorted_back,
        loss_ranks,
        sorted_losses,
        scan,
        mapped,
        loop,
        running_totals,
        centred,
        standardised,
        contrasted,
        rolled,
        rolled_back,
        flipped,
        position_weights,
        first_half,
        batch_size,
        halves_swapped,
        transposed_blocks,
        best_of_batch,
        identity_matrix,
        table_of_positions,
        late_branch,
        until_converged,
        dropped,
        own_derivative,
        checkpointed,
        called_back,
    )
}


def along_axis(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return -_of_label(jax.nn.log_softmax(logits), batch["z"])


def one_hot(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.one_hot(batch["z"], NUM_CLASSES) * jax.nn.log_softmax(logits), axis=1)


def by_vmap(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return -jax.vmap(lambda row, label: jax.nn.log_softmax(row)[label])(logits, batch["z"])


def sliced_by_vmap(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    def one(row: jax.Array, label: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.dynamic_slice(jnp.tanh(row), (label,), (2,)))

    return jax.vmap(one)(logits, batch["z"])


def sorted_classes(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jax.lax.top_k(logits, 2)[0].sum(axis=1) + jnp.sort(logits, axis=1)[:, 0]


def recurrent(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """A scan over time, all examples at once."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state + x[:, None] * logits)
        return state, state[:, 0]

    return jax.lax.scan(step, jnp.zeros_like(logits), batch["x"].T)[1].sum(axis=0)


def sequences(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Sequences laid one after the other, and attention within each."""
    tokens = jnp.tanh(logits[:, :, None] * jnp.arange(1.0, 4.0)[None, None])  # [B, T, 3]
    flat = jax.nn.gelu(tokens.reshape(-1, 3) @ jnp.ones((3, 3))).reshape(tokens.shape)
    scores = jax.nn.softmax(jnp.einsum("bti,bsi->bts", flat, tokens) / 3)
    return jnp.einsum("bts,bsi->bti", scores, tokens).mean(axis=(1, 2))


def masked_bits(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """Dropout with one key a microbatch: the bits are kept for the backward pass."""
    return (jnp.tanh(logits) * _bits(rng, logits)).sum(axis=1)


def repeated(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(2 * x), logits).sum(axis=1)


def as_wide_as_the_batch(logits: jax.Array, batch: Any, rng: jax.Array) -> jax.Array:
    """A layer whose width happens to be the number of examples."""
    layer = np.linspace(-1, 1, NUM_CLASSES * MICROBATCH, dtype=np.float32)
    hidden = jnp.tanh(logits @ layer.reshape(NUM_CLASSES, MICROBATCH))
    return (hidden * np.arange(MICROBATCH, dtype=np.float32)[None]).sum(axis=1)


EASY: dict[str, Term] = {
    term.__name__: term
    for term in (
        along_axis,
        one_hot,
        by_vmap,
        sliced_by_vmap,
        sorted_classes,
        recurrent,
        sequences,
        masked_bits,
        repeated,
        as_wide_as_the_batch,
    )
}
