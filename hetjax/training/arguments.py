"""What `fit` is given: checks of it, and fields that become a configuration."""

import dataclasses
from typing import Any

import jax
import numpy as np

from hetjax import config as config_lib
from hetjax import ordering, quota
from hetjax.topology import reducers
from hetjax.training import gate

# Fields of the configuration that stand for what `fit` is given as arguments.
_OF_THE_CALLER = ("model", "optimizer")
_OF_THE_CALLER_DATA = ("name", "dir", "num_train")


def registries() -> dict[str, list[str]]:
    """The names that fields of a configuration may hold, from where they are registered."""
    return {
        "quota.policy": list(quota.POLICIES),
        "ordering.method": list(ordering.ORDERINGS),
        "reducer.name": list(reducers.REDUCERS),
        "gate.trigger": list(gate.GATES),
    }


def check(params: Any, optimizer: Any, callbacks: Any = ()) -> None:
    """Refuses what `fit` cannot use.

    Raises:
        ValueError: it is not what its name says.
    """
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise ValueError(
            f"fit: optimizer is {optimizer!r}; it must be an optax optimiser such as "
            "optax.sgd(0.1), with an init and an update"
        )
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise ValueError("fit: callbacks must be a list of functions, such as [print]")
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise ValueError(
                f"fit: params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}; params is a "
                "pytree of arrays. For a Flax model: loss_fn, params = hetjax.nnx_loss(model, loss)"
            )


def configuration(
    config: config_lib.ExperimentConfig | None, fields: dict[str, Any], *, workers: int | None
) -> tuple[config_lib.ExperimentConfig, dict[str, Any]]:
    """The checked configuration, and what of it is recorded.

    Args:
        config: checked already; or None.
        fields: or its fields.
        workers: their number, in place of `cluster.num_workers`; None: not given.

    Raises:
        ValueError: both are given, or a field is wrong.
    """
    if workers is not None:
        cluster = fields.get("cluster", {})
        fields = {**fields, "cluster": {**cluster, "num_workers": workers}}
    if config is None:
        config = config_of_fields(fields)
        return config, recorded_fields(config)
    if fields:
        raise ValueError(f"give either config or fields, not both: {sorted(fields)}")
    return config, config_lib.to_dict(config)


def config_of_fields(fields: dict[str, Any]) -> config_lib.ExperimentConfig:
    """Fields over the defaults, with a worker for each device, or `virtual` where they lack.

    Raises:
        ValueError: a field is wrong, or is none that `fit` uses.
    """
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()}
    data = fields.get("data")
    given = [name for name in _OF_THE_CALLER if name in fields] + [
        f"data.{name}" for name in _OF_THE_CALLER_DATA if isinstance(data, dict) and name in data
    ]
    if given:
        raise ValueError(
            f"fit: {', '.join(given)}: these fields are for the command line; here the model, "
            "the optimizer and the data are the arguments loss_fn, optimizer and source"
        )
    cluster = fields.setdefault("cluster", {})
    if isinstance(cluster, dict):
        speeds = cluster.get("secs_per_microbatch", ())
        num_speeds = np.size(speeds) if np.ndim(speeds) else 0
        cluster.setdefault("num_workers", num_speeds or jax.device_count())
    config = config_lib.validate(fields, choices=registries())
    num_workers = config.cluster.num_workers
    if "local" not in fields and num_workers > jax.device_count():
        print(
            f"hetjax: {num_workers} workers on {jax.device_count()} device(s): local='virtual' "
            "plays them one after the other, and their clocks are virtual. For a CPU device "
            f"each, call hetjax.use_cpu_workers({num_workers}) before JAX is first used; on "
            "GPUs take no more workers than there are."
        )
        config = dataclasses.replace(config, local="virtual")
    return config


def recorded_fields(config: config_lib.ExperimentConfig) -> dict[str, Any]:
    """The fields that a run by `fit` depends on, for its `config.json`."""
    recorded = config_lib.to_dict(config)
    for group in _OF_THE_CALLER:
        del recorded[group]
    for field in _OF_THE_CALLER_DATA:
        del recorded["data"][field]
    return recorded
