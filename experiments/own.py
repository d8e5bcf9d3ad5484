"""Models, data sets, losses and metrics of one's own, by import path: `docs/commands.md` is their
contract. Each is called with what it names, and what it returns is looked at where it comes in.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen, nnx

import experiments
import hetjax
from hetjax import parts
from hetjax.data import sources
from hetjax.zoo import config as config_lib
from hetjax.zoo import datasets

_MODELS = (
    "a flax.nnx.Module; (module, variables) of flax.linen; (loss_fn, params) of hetjax.nnx_loss or "
    "the like; or parameters, a pytree of arrays"
)
_LOSSES = "an array f[B], one number an example; (losses, weights); or a hetjax.Losses"
_METRICS = "a dict, {'name': values f[B]}, or (values, weights), or a hetjax.OfMeans, for a name"
_DATA = "{'train': …, 'test': …}, sets by name, or a hetjax.zoo.datasets.Dataset"


class Model(NamedTuple):
    """What `hetjax.fit` needs of a model."""

    loss_fn: Any
    params: Any
    metrics_fn: Any  # None: the loss alone is measured
    given: Mapping[str, Any] = MappingProxyType({})  # `frozen` and `values` of `hetjax.fit`


def function(field: str, path: str) -> Any:
    """The function at an import path.

    Raises:
        ValueError: there is none.
    """
    try:
        found = parts.imported(path)
    except ValueError as error:
        raise ValueError(f"{field}: {error}.") from error
    if not callable(found):
        raise ValueError(f"{field}: {path!r} is {parts.shown(found)}, must be a function.")
    return found


def loss(path: str) -> Any:
    """The loss at an import path; None of another name. What it returns is looked at.

    Raises:
        ValueError: there is none.
    """

    def is_right(returned: Any, size: int) -> bool:
        found = returned if isinstance(returned, tuple) else (returned,)
        return len(found) in (1, 2, 3) and np.shape(found[0])[:1] == (size,)

    return _checked("loss", path, is_right, f"A loss is {_LOSSES}.")


def metrics(path: str) -> Any:
    """As `loss`, of the function that measures."""

    def is_right_one(found: Any, size: int) -> bool:
        if isinstance(found, tuple):
            return np.shape(found[0])[:1] == (size,)
        return not hasattr(found, "shape") or found.shape == (size,)

    def is_right(returned: Any, size: int) -> bool:
        return isinstance(returned, Mapping) and all(
            isinstance(name, str) and is_right_one(found, size) for name, found in returned.items()
        )

    return _checked("metrics", path, is_right, f"Metrics are {_METRICS}.")


def _checked(field: str, path: str, is_right: Callable[[Any, int], bool], allowed: str) -> Any:
    if not parts.is_path(path):
        return None
    given = function(field, path)
    if not inspect.isfunction(given):  # such as hetjax.batch_loss(…), which checks by itself
        return given

    @functools.wraps(given)
    def checked(model: Any, batch: Any, *args: Any, **named: Any) -> Any:
        returned, size = given(model, batch, *args, **named), len(jax.tree.leaves(batch)[0])
        if not is_right(returned, size):
            raise ValueError(
                f"{field}: {path!r} returned {_said(returned)} of {size} examples. {allowed}"
            )
        return returned

    return checked


def called(
    field: str, path: str, given: Mapping[str, Callable[[], Any]], options: Mapping[str, Any]
) -> Any:
    """What the function at an import path returns, of those of `given` that it names, and options.

    Raises:
        ValueError: there is no such function, or it does not take the options.
    """
    make = function(field, path)
    # A class of NNX has a signature that says nothing.
    signed = functools.partial(make.__init__, None) if isinstance(make, type) else make
    named = parts.asked_for(signed, list(given))
    if not parts.takes(signed, 0, *named, *options):
        group = field.partition(".")[0]
        raise ValueError(
            f"{field}: {path!r} cannot be called with {', '.join([*named, *options]) or 'nothing'}."
            f" It may name {', '.join([*given, ''])}and options with defaults; others stand in "
            f"{group}.arguments."
        )
    return make(**{name: given[name]() for name in named}, **options)


def model(path: str, built: Any, loss: Any, metrics: Any, by_kind: Any = None) -> Model:
    """Of what the function at `path` has returned.

    Args:
        path: for messages.
        built: what it returned.
        loss: as `hetjax.nnx_loss` or `linen_loss` takes it, or `fit` with parameters; None: there
            is none.
        metrics: likewise; None: there are none.
        by_kind: `loss` and `metrics` of a model of Flax that has none, as attributes.

    Raises:
        ValueError: it is no model, or the loss is missing, or is there twice.
    """
    given: Mapping[str, Any] = {}
    if isinstance(built, tuple) and len(built) == 3 and isinstance(built[2], Mapping):
        built, given = built[:2], built[2]
    if unknown := sorted(given.keys() - {"frozen", "values"}):
        raise ValueError(f"model.name: {path!r} gives {unknown}; allowed are frozen and values.")
    first = built[0] if isinstance(built, tuple) and len(built) == 2 else None
    is_linen = isinstance(first, linen.Module) and isinstance(built[1], Mapping)
    if callable(first) and not isinstance(first, linen.Module):
        if loss is not None:
            raise ValueError(f"loss: model.name={path!r} returns (loss_fn, params); give no loss.")
        return Model(*built, metrics, given)
    is_flax = is_linen or isinstance(built, nnx.Module)
    if is_flax and by_kind is not None:
        loss, metrics = loss or by_kind.loss, metrics or by_kind.metrics
    leaves = [] if is_flax else jax.tree.leaves(built)
    if not is_flax and not (leaves and all(hasattr(leaf, "dtype") for leaf in leaves)):
        raise ValueError(f"model.name: {path!r} returned {_said(built)}. A model is {_MODELS}.")
    if loss is None:
        raise ValueError(
            f"loss: missing. The kind of these examples has none for {path!r}; set "
            "loss='module:function'."
        )
    if not is_flax:
        return Model(loss, built, metrics)
    given = built if is_linen else (built,)
    of_loss, of_metrics = (
        (hetjax.linen_loss, hetjax.linen_metrics)
        if is_linen
        else (hetjax.nnx_loss, hetjax.nnx_metrics)
    )
    return Model(*of_loss(*given, loss), metrics and of_metrics(*given, metrics))


def check_optimizer(optimizer: config_lib.OptimizerConfig) -> None:
    """Refuses a function of one's own that makes no optimiser."""
    if not parts.is_path(optimizer.name):
        return
    made = called("optimizer.name", optimizer.name, {}, dict(optimizer.arguments))
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"optimizer.name: {optimizer.name!r} returned {_said(made)}. An optimiser is an "
            "optax.GradientTransformation without its learning rate, as optax.scale_by_adam()."
        )


def dataset(data: config_lib.DataConfig) -> datasets.Dataset:
    """The data set that a function of one's own loads.

    Raises:
        ValueError: it returned something else.
    """
    path = data.name
    found = called("data.name", path, {"dir": lambda: data.dir}, dict(data.arguments))
    known = found if isinstance(found, datasets.Dataset) else None
    given = found if known is None else {"train": known.train, **known.evals}
    if not isinstance(given, Mapping) or "train" not in given:
        raise ValueError(f"data.name: {path!r} returned {_said(found)}. Data is {_DATA}.")
    sets = {}
    for name, each in given.items():
        try:
            sets[name] = sources.as_source(each)
        except ValueError as error:
            raise ValueError(f"data.name: {path!r} returned a set {name!r}: {error}.") from error
    if known is None:
        known = datasets.Dataset(sets["train"], {}, None, None, path, kind="")
    return dataclasses.replace(known, train=sets.pop("train"), evals=sets)


def digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Of the source of each module that a configuration names, by import path."""
    found: dict[str, str] = {}
    for value in config.values():
        if isinstance(value, Mapping):
            found |= digests(value)
        elif isinstance(value, str) and parts.is_path(value):
            spec = None
            with contextlib.suppress(ImportError):  # whoever calls it tells that there is none
                spec = importlib.util.find_spec(value.partition(":")[0])
            if spec is not None and spec.origin and not value.startswith("hetjax."):
                source = pathlib.Path(spec.origin).read_bytes()
                found[value] = hashlib.sha256(source).hexdigest()[:16]
    return found


def told(error: Exception) -> str:
    """What an error says, behind the line of one's own code that it passed through, if any."""
    ours = [str(pathlib.Path(each.__file__ or "").parent) for each in (hetjax, experiments)]
    lines = [
        f"{frame.filename}, line {frame.lineno}: "
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*ours, sysconfig.get_path("stdlib"), "<"))
        and "site-packages" not in frame.filename
    ]
    return f"{lines[-1] if lines else ''}{error}"


def first_batch(source: sources.Source) -> Any:
    """The first example, with an axis of 1 before it."""
    example = sources.read(sources.of_epoch(source, 0), 0)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], example)


def _said(returned: Any) -> str:
    """What a function returned, in a few words."""
    if isinstance(returned, Mapping):
        items = [f"{name!r}: {parts.shown(each)}" for name, each in returned.items()]
        return f"{type(returned).__name__} {{{', '.join(items)}}}"
    if isinstance(returned, tuple):
        return f"a tuple of {', '.join(map(parts.shown, returned)) or 'nothing'}"
    return parts.shown(returned)
