"""The models of a cleaning run, their losses, and how one is trained for good."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hetjax
from experiments import own, tasks
from experiments.bilevel import data as data_lib
from experiments.bilevel import settings
from hetjax import parts
from hetjax.types import PyTree


class Net(NamedTuple):
    """A model of a run: its first parameters, the losses f[n], and which answers are right."""

    params: PyTree
    losses: Callable[[PyTree, data_lib.Images], jax.Array]
    right: Callable[[PyTree, data_lib.Images], jax.Array]


def net(config: settings.CleaningConfig, data: data_lib.Data) -> Net:
    """Of a configuration, whose model, loss and metrics may be one's own.

    Raises:
        ValueError: they are no such functions, or the model keeps a state.
    """
    path, sets = config.model.name, data.train
    loss, metrics = own.loss(config.loss), own.metrics(config.metrics)
    params = None
    if not parts.is_path(path):
        params = init(config.model, _rows(sets.images).shape[1], data.num_classes, config.seed)
        if loss is metrics is None:
            return Net(params, losses, right)
    batch = _batch(data_lib.Images(*jax.tree.map(lambda leaf: leaf[:1], sets)))
    kinds = [name for name in batch if name != "label"]
    by_kind = tasks.measures_of(kinds[0], data.num_classes) if len(kinds) == 1 else None
    if params is None:
        given = {"rngs": lambda: nnx.Rngs(config.seed), "batch": lambda: batch}
        built = own.called("model.name", path, given, dict(config.model.arguments))
        made = own.model(path, built, loss, metrics, by_kind)
    else:
        assert by_kind is not None
        asked = loss or by_kind.loss, metrics or by_kind.metrics
        told, measured = (
            lambda y, batch, *_, f=f: f(functools.partial(logits, y), batch) for f in asked
        )
        made = own.Model(told, params, measured)
    if not callable(made.loss_fn) or isinstance(made.loss_fn, hetjax.StatefulLoss):
        raise ValueError(f"model.name: {path!r} keeps a state, which cleaning leaves out.")
    if made.metrics_fn is None:
        raise ValueError(f"metrics: missing; {path!r} needs a function with 'accuracy'.")

    def own_losses(y: PyTree, images: data_lib.Images) -> jax.Array:
        found = made.loss_fn(y, _batch(images), jax.random.key(config.seed))
        if isinstance(found, tuple):
            raise ValueError("loss: cleaning weighs the examples itself; return f[B] alone.")
        return found

    def own_right(y: PyTree, images: data_lib.Images) -> jax.Array:
        found = made.metrics_fn(y, _batch(images))
        if "accuracy" not in found:
            raise ValueError(f"metrics: cleaning wants 'accuracy', got {', '.join(found)}.")
        return found["accuracy"]

    return Net(made.params, own_losses, own_right)


def _batch(images: data_lib.Images) -> dict[str, Any]:
    """The examples as a function of one's own gets them."""
    fields = images.images if isinstance(images.images, dict) else {"image": images.images}
    return {**fields, "label": images.labels}


def _rows(images: Any) -> Any:
    """`f[n, d]`, of examples of one's own those of the only field."""
    if not isinstance(images, dict):
        return images
    if len(images) > 1:
        raise ValueError(
            f"data.name: examples with {', '.join(images)} beside 'label' want a model of one's "
            "own; softmax and mlp take one field."
        )
    (only,) = images.values()
    return only.reshape(len(only), -1).astype(np.float32)


def init(config: settings.Model, input_size: int, num_classes: int, seed: int) -> PyTree:
    """Zeros for softmax regression; random numbers for the hidden layer of an MLP."""
    if config.name == "softmax":
        return {"out": _layer(np.zeros((input_size, num_classes), np.float32))}
    rng = np.random.default_rng(seed)
    sizes = {"hidden": (input_size, config.hidden), "out": (config.hidden, num_classes)}
    return {
        name: _layer(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))
        for name, shape in sizes.items()
    }


def _layer(weights: np.ndarray) -> PyTree:
    return {"weights": jnp.asarray(weights), "bias": jnp.zeros(weights.shape[1])}


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """`f[n, classes]`; a sigmoid between the layers where there are two."""
    images = _rows(images)
    if "hidden" in params:
        images = jax.nn.sigmoid(_affine(params["hidden"], images))
    return _affine(params["out"], images)


def _affine(layer: PyTree, inputs: jax.Array) -> jax.Array:
    return inputs @ layer["weights"] + layer["bias"][None]


def losses(params: PyTree, batch: data_lib.Images) -> jax.Array:
    """Cross-entropy of each example, f[n]."""
    scores = logits(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels)


def squares(params: PyTree) -> jax.Array:
    """`|weights|^2`, without the biases."""
    weights = (leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    return sum((jnp.sum(leaf**2) for leaf in weights), jnp.zeros(()))


def right(params: PyTree, batch: data_lib.Images) -> jax.Array:
    """Whether each answer is right, bool[n]."""
    return logits(params, batch.images).argmax(-1) == batch.labels


@functools.partial(jax.jit, static_argnames="right")
def accuracy(params: PyTree, batch: data_lib.Images, right: Any = right) -> jax.Array:
    """The share of right answers."""
    return jnp.mean(right(params, batch))


def both(first: data_lib.Images, second: data_lib.Images) -> data_lib.Images:
    """One set behind the other."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), first, second)


@functools.partial(jax.jit, static_argnames=("num_steps", "losses"))
def train(
    params: PyTree,
    batch: data_lib.Images,
    weights: jax.Array,
    ridge: Any,
    *,
    num_steps: int,
    losses: Any = losses,
) -> PyTree:
    """The minimum of `sum(weights * losses) / sum(weights) + ridge / 2 |w|^2`, by L-BFGS."""

    def value(params: PyTree) -> jax.Array:
        mean = jnp.sum(weights * losses(params, batch)) / jnp.sum(weights)
        return mean + ridge / 2 * squares(params)

    tx = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(value)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        loss, grads = value_and_grad(params, state=state)
        updates, state = tx.update(grads, state, params, value=loss, grad=grads, value_fn=value)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, length=num_steps)[0][0]
