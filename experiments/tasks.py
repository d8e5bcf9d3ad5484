"""What a run of `experiments.train` minimises and measures, by the kind of its examples.

A task is a data set, a model that takes its examples, a loss and the metrics that are its own. The
kind of the examples (`datasets.Dataset.kind`) says which loss and metrics these are; `make` puts
everything together from a configuration.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx

import hetjax
from experiments import own
from hetjax import parts
from hetjax.data import sources
from hetjax.parts import options as options_lib
from hetjax.zoo import config as config_lib
from hetjax.zoo import datasets, images, models
from hetjax.zoo.models import forecasting

_AT_ONCE = 16  # chunks of text whose logits an evaluation holds at a time


class Measures(NamedTuple):
    """The loss of a kind of examples, and what is measured of an evaluated set."""

    loss: Callable[[nnx.Module, Any], Any]  # (model, batch) -> f[B], or (losses, weights)
    metrics: Callable[[nnx.Module, Any], dict[str, Any]]
    names: tuple[str, ...]  # of the metrics


class Task(NamedTuple):
    """All that `hetjax.fit` needs of a configuration."""

    loss_fn: Any
    params: Any
    metrics_fn: Any
    train: sources.Source
    evals: Mapping[str, sources.Source]
    model: Any
    dataset: datasets.Dataset
    given: Mapping[str, Any]  # what `hetjax.fit` is given by name


def load(data: config_lib.DataConfig) -> datasets.Dataset:
    """Opens the data of a configuration.

    Raises:
        ValueError: they are missing or damaged.
    """
    if parts.is_path(data.name):
        return own.dataset(data)
    _refuse_arguments("data", data)
    options = {name: getattr(data, name) for name in datasets.options_of(data.name)}
    return datasets.load(data.name, data.dir or None, **options)


def make(config: config_lib.ExperimentConfig, dataset: datasets.Dataset | None = None) -> Task:
    """Makes the model, and opens the data, unless `dataset` has them.

    Raises:
        ValueError: the data are missing or damaged, the model cannot take them, or there is no
            such metric.
    """
    dataset = dataset or load(config.data)
    classes, path = dataset.num_classes, config.model.name
    is_own = parts.is_path(path)
    if not is_own and (classes is None or dataset.example_shape is None):
        raise ValueError(
            f"data.name: {config.data.name!r} has no class labels or shape of examples, which the "
            "reference models need. Set model.name='module:function' and loss, or load a "
            "hetjax.zoo.datasets.Dataset with both"
        )
    own.check_optimizer(config.optimizer)
    loss, metrics = own.loss(config.loss), own.metrics(config.metrics)
    measures = None if loss or classes is None else measures_of(dataset.kind, classes)
    _check(config, dataset, None if metrics else measures)
    train = _training(config, dataset)
    options = _model_options(config, dataset)
    rngs = nnx.Rngs(config.seed)
    if is_own:
        given = {"rngs": lambda: rngs, "batch": lambda: own.first_batch(train)}
        model = own.called("model.name", path, given, dict(config.model.arguments))
    else:
        _refuse_arguments("model", config.model)
        assert classes is not None
        model = models.make(path, dataset.example_shape or (), classes, rngs=rngs, **options)
    made = own.model(path, model, loss, metrics, by_kind=measures)
    return Task(*made[:3], train, dataset.evals, model, dataset, made.given)


def _refuse_arguments(group: str, fields: Any) -> None:
    if fields.arguments:
        raise ValueError(
            f"{group}.arguments: got {dict(fields.arguments)}, but {fields.name!r} takes none; "
            "they are of a 'module:function'."
        )


def measures_of(kind: str, num_classes: int) -> Measures:
    """Of examples whose field `kind` the model takes."""
    if kind == "tokens":
        return _of_tokens()
    return _of_series() if kind == "past" else _of_labels(kind, num_classes)


def _check(
    config: config_lib.ExperimentConfig, dataset: datasets.Dataset, measures: Measures | None
) -> None:
    """Refuses a model that takes other examples, and a metric that this one does not give.

    What one's own functions take and give is seen when the run begins.
    """
    name = config.model.name
    if not parts.is_path(name) and dataset.kind not in models.TAKES[name]:
        fitting = [other for other, kinds in models.TAKES.items() if dataset.kind in kinds]
        raise ValueError(
            f"model.name: got {name!r}, which takes {_and(models.TAKES[name])}; the examples of "
            f"data.name={dataset.name!r} have {dataset.kind!r}. Set it to one of "
            f"{', '.join(fitting)}"
        )
    if not config.best_by or measures is None:
        return
    names = list(measures.names)
    names += [f"ema_{metric}" for metric in names if config.ema]
    given = [
        f"{prefix}{metric}"
        for prefix in ("", *(f"{set_name}_" for set_name in dataset.evals))
        for metric in names
    ]
    if config.best_by not in given:
        hint = options_lib.nearest(config.best_by, given)
        if "ema_" in config.best_by and not config.ema:
            hint = " That of an average needs ema, such as ema=0.999."
        raise ValueError(
            f"best_by: got {config.best_by!r}, a metric that model.name={name!r} on "
            f"data.name={dataset.name!r} cannot give; it gives {', '.join(names)}.{hint}"
        )


def _and(kinds: tuple[str, ...]) -> str:
    return " or ".join(repr(kind) for kind in kinds)


def _model_options(
    config: config_lib.ExperimentConfig, dataset: datasets.Dataset
) -> dict[str, Any]:
    """The fields `model.…` that the model has; 0 is its own default."""
    is_own = parts.is_path(config.model.name)
    mine = () if is_own else models.options_of(config.model.name)
    names = ("hidden", "width", "norm", "blocks", "heads")
    given = {name: getattr(config.model, name) for name in names}
    options = {name: value for name, value in given.items() if name in mine and value != 0}
    default = config_lib.ModelConfig()
    for name in names:
        if name not in mine and given[name] != getattr(default, name):
            logging.warning(
                "model.%s=%r has no effect: model.name=%r has no such option.%s",
                name,
                given[name],
                config.model.name,
                f" Set model.arguments.{name}." if is_own else "",
            )
    if dataset.kind in models.TAKES["mlp"]:  # numbers, whose range is known
        options["input_max"] = 1.0
        if dataset.kind == "image":
            options["input_max"] = 16.0 if dataset.name == "digits" else 255.0
    return options


class _First:
    """The first examples of a source that is not in memory."""

    def __init__(self, source: Any, num_examples: int) -> None:
        self._source, self._len = source, num_examples
        self.dataset_info = getattr(source, "dataset_info", None)  # says which files may be damaged
        if hasattr(source, "__getitems__"):  # many records at once take half the time
            self.__getitems__ = source.__getitems__

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < self._len:
            raise IndexError(f"example {index} of a source of {self._len}")
        return self._source[index]


def first(source: sources.Source, num_examples: int) -> sources.Source:
    """The first examples of a source, of which there are as many, as a source."""
    if isinstance(source, sources.ArraySource):
        arrays = jax.tree.map(lambda leaf: leaf[:num_examples], source.arrays)
        return sources.ArraySource(arrays, notes=source.notes)
    return _First(source, num_examples)


def _training(config: config_lib.ExperimentConfig, dataset: datasets.Dataset) -> sources.Source:
    train, wanted = dataset.train, config.data.num_train
    if wanted > len(train):
        raise ValueError(
            f"data.num_train: got {wanted}, but {dataset.name!r} has {len(train)} training "
            "examples. Lower it, or set it to 0 for all of them"
        )
    if wanted and (hasattr(train, "of_run") or hasattr(train, "of_epoch")):
        raise ValueError(
            f"data.num_train: got {wanted}, but {dataset.name!r} reads examples anew; take the "
            "first ones where it loads them"
        )
    if wanted:
        train = first(train, wanted)
    if parts.is_path(config.data.augmentation):
        return hetjax.augmented(train, own.function("data.augmentation", config.data.augmentation))
    if config.data.augmentation != "none":
        if dataset.kind != "image":
            raise ValueError(
                f"data.augmentation: got {config.data.augmentation!r}, which is of images; "
                f"{dataset.name!r} has {dataset.kind!r}. Set it to 'none'"
            )
        return hetjax.augmented(train, images.AUGMENTATIONS[config.data.augmentation])
    if isinstance(train, sources.ArraySource) and dataset.notes:
        train = sources.ArraySource(train.arrays, notes=(*train.notes, optimizer_note(config)))
    return train


def optimizer_note(config: config_lib.ExperimentConfig) -> str:
    """A sentence that says which optimiser a run has."""
    chosen = config.optimizer
    parts = [f"{chosen.name} at a learning rate of {chosen.learning_rate:g} ({chosen.schedule})"]
    if chosen.name == "sgd" and chosen.momentum:
        parts.append(f"momentum {chosen.momentum:g}")
    if chosen.weight_decay:
        parts.append(f"weight decay {chosen.weight_decay:g}")
    if chosen.clip_norm:
        parts.append(f"the gradient clipped at a norm of {chosen.clip_norm:g}")
    batch = config.budget * config.microbatch_size
    return f"The optimiser is {', '.join(parts)}; an update takes {batch} examples."


# Labelled examples


def _of_labels(kind: str, num_classes: int) -> Measures:
    binary = num_classes == 2

    def loss(model: Any, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch[kind]), batch["label"])

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        logits, labels = model(batch[kind]), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        said = logits.argmax(-1)
        found = {"loss": losses, "accuracy": said == labels}
        if binary:
            truths = [(said == a) & (labels == b) for a in (1, 0) for b in (1, 0)]
            found["matthews"] = hetjax.OfMeans(matthews, *truths)
        return found

    return Measures(loss, metrics, ("loss", "accuracy", *(("matthews",) if binary else ())))


def matthews(
    true_positive: float, false_positive: float, false_negative: float, true_negative: float
) -> float:
    """Matthews' correlation of two classes, from the shares of the four outcomes.

    0 where only one class is said, or only one is there.
    """
    said, not_said = true_positive + false_positive, false_negative + true_negative
    positive, negative = true_positive + false_negative, false_positive + true_negative
    scale = math.sqrt(said * not_said * positive * negative)
    both = true_positive * true_negative - false_positive * false_negative
    return both / scale if scale > 0 else 0.0


# Language models


def _of_tokens() -> Measures:
    def losses_of(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        following = tokens[:, 1:]
        logits = model(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(following, 0))
        return losses, jnp.asarray(following >= 0, losses.dtype)

    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return losses_of(model, batch["tokens"])

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        def one(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, weights = losses_of(model, tokens[None])
            return losses[0], weights[0]

        found = jax.lax.map(one, batch["tokens"], batch_size=_AT_ONCE)
        return {"loss": found, "perplexity": hetjax.OfMeans(np.exp, found)}

    return Measures(loss, metrics, ("loss", "perplexity"))


# Time series


def _of_series() -> Measures:
    def loss(model: Any, batch: Any) -> jax.Array:
        told = model(batch["past"])
        error = jnp.abs(told - batch["future"][:, : told.shape[1]])
        return (error / forecasting.spread(batch["past"])).mean(-1)

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        past, future = batch["past"], batch["future"]
        told = forecasting.forecast(model, past, future.shape[1])
        return {
            "loss": loss(model, batch),
            "smape": smape(told, future),
            "naive_smape": smape(jnp.broadcast_to(past[:, -1:], future.shape), future),
        }

    return Measures(loss, metrics, ("loss", "smape", "naive_smape"))


def smape(told: jax.Array, future: jax.Array) -> jax.Array:
    """The symmetric mean absolute percentage error of each forecast, `f[B]`, as the M4 has it.

    200 |told - future| / (|told| + |future|), the mean over the horizon; 0 where both are 0.
    """
    size = jnp.abs(told) + jnp.abs(future)
    error = jnp.abs(told - future) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    return 200.0 * error.mean(-1)
