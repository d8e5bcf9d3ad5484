"""A loss over all examples of a round: contrastive, of two towers, of a distribution.

Its gradient needs the embeddings of all examples, and the memory of one microbatch is enough for
it. A round has two passes over the same microbatches, with the same random keys. The first gathers
the embeddings. Then each process takes the gradient of the loss in them, and in the parameters that
the loss itself uses. The second pass pulls the gradient back through each microbatch.

References:
    Gao, Zhang, Han, Callan, "Scaling deep contrastive learning batch size under memory limited
    setup", 2021, arXiv 2101.06983 (GradCache). Here the batch is divided among unequal workers, and
    the loss may use parameters of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from hetjax import parts, types
from hetjax.losses import named as named_lib


@dataclasses.dataclass(frozen=True, eq=False)
class BatchLoss:
    """What `batch_loss` returns; of one microbatch alone it is a loss like any other."""

    embed: Callable[[types.PyTree, types.PyTree, jax.Array], types.PyTree]
    loss: Callable[[types.PyTree, types.PyTree, jax.Array], jax.Array]
    asks: tuple[str, ...] = ()  # what the two name
    frozen: types.PyTree = None  # what an adapter took out of the model of `embed`
    no_state: ClassVar[str] = "; hetjax.batch_loss takes no model_state"

    def __call__(self, params: types.PyTree, examples: types.PyTree, rng: jax.Array) -> jax.Array:
        """`f[B]`, B times the loss of only these examples.

        Raises:
            ValueError: `embed` or `loss` returned something else than they may.
        """
        size = jax.tree.leaves(examples)[0].shape[0]
        embedded = self.embed(params, examples, rng)
        wrong = [
            f"{jax.tree_util.keystr(path)} {parts.shown(leaf)}"
            for path, leaf in jax.tree.leaves_with_path(embedded)
            if jnp.shape(leaf)[:1] != (size,) or not jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        if wrong or not jax.tree.leaves(embedded):
            raise ValueError(
                f"batch_loss: embed returned {', '.join(wrong) or 'no arrays'}; each array must be "
                f"floating point [{size}, …], a row an example"
            )
        value = self.loss(params, embedded, jnp.ones(size, jnp.float32))
        if jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ValueError(
                f"batch_loss: loss returned {parts.shown(value)}, must be one floating point number"
            )
        return jnp.broadcast_to(value, (size,))


def batch_loss(
    embed: Callable[[types.PyTree, types.PyTree, jax.Array], types.PyTree],
    loss: Callable[[types.PyTree, types.PyTree, jax.Array], jax.Array],
) -> BatchLoss:
    """A loss over all examples of a round, exact for any quotas, in the memory of a microbatch.

    `fit` and `Run` take it as `loss_fn`. An update descends `loss(params, e, mask)`, where e are
    the embeddings of all N = budget * microbatch_size examples of a round, in the round's order.
    A round calls `embed` twice for each example, forwards, and once backwards.

    Args:
        embed: `(params, batch, rng) -> e`, a pytree of floating point arrays `[B, ...]`, a row an
            example, such as of two towers. `rng` is the same key in both calls.
        loss: `(params, e, mask f32[N]) -> f[]`, with leaves `[N, ...]`. Where a round has fewer
            examples, the mask is 0 and the row is another example's: leave it out.

    Returns:
        a record; called as `loss_fn(params, batch, rng)` it is the loss of one microbatch alone.

    Raises:
        ValueError: one of the two takes other arguments.

    Example:
        >>> def embed(params, batch, rng):
        ...     return batch["x"] @ params["w"]
        >>> def loss(params, e, mask):  # as far from each other as can be
        ...     is_pair = jnp.outer(mask, mask) * (1 - jnp.eye(len(mask)))
        ...     near = jnp.exp(-((e[:, None] - e[None]) ** 2))
        ...     return jnp.sum(is_pair * near) / jnp.sum(is_pair)
        >>> loss_fn = batch_loss(embed, loss)
        >>> params, batch = {"w": jnp.ones(2)}, {"x": jnp.array([[0.0, 0.0], [1.0, 0.0]])}
        >>> [round(float(each), 3) for each in loss_fn(params, batch, jax.random.key(0))]
        [0.368, 0.368]
    """
    forms = {"embed": "embed(params, batch, rng) -> e[B, …]", "loss": "loss(params, e, mask)"}
    given = [named_lib.giving(function, 3) for function in (embed, loss)]
    for (name, form), function in zip(forms.items(), given, strict=True):
        if not callable(function) or not parts.takes(function, 3):
            raise ValueError(f"batch_loss: {name} is called as {form}; got {parts.shown(function)}")
    asks = tuple(name for each in given for name in getattr(each, "asks", ()))
    return BatchLoss(given[0], given[1], asks, getattr(embed, "frozen", None))


def check_evaluation(loss_fn: Any, metrics_fn: Any, *, is_asked: bool) -> None:
    """Refuses to evaluate a loss over the round by itself: a batch of an evaluation is no round.

    Raises:
        ValueError: sets are to be evaluated, and no metrics are given.
    """
    if is_asked and metrics_fn is None and isinstance(loss_fn, BatchLoss):
        raise ValueError("batch_loss: the loss is over a round; to evaluate, give metrics_fn")
