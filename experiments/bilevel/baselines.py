"""What cleaning is compared with; without them its accuracy says little.

Each is a model trained to its minimum on some of the examples, all by the same ridge.
"""

from typing import Any

import numpy as np

from experiments.bilevel import cleaning, models, settings
from experiments.bilevel import data as data_lib
from hetjax.types import PyTree

TITLES = {
    "polluted": "polluted part alone",
    "validation": "validation alone",
    "both": "both",
    "oracle": "oracle: right labels and validation",
    "trimming": "trimming by the loss of both",
    "trimming_validation": "trimming by the loss of validation alone",
}


def trained(config: settings.CleaningConfig, data: data_lib.Data) -> dict[str, PyTree]:
    """The models of the baselines that choose no examples; the estimator has no part in them."""
    net = models.net(config, data)
    whole = {"polluted": (1, 0), "validation": (0, 1), "both": (1, 1), "oracle": (data.is_right, 1)}
    return {name: _trained(config, data, net, *weights) for name, weights in whole.items()}


def run(
    config: settings.CleaningConfig,
    data: data_lib.Data,
    kept_fraction: float,
    models_of: dict[str, PyTree] | None = None,
) -> dict[str, dict[str, Any]]:
    """All of them: test accuracy, and F1 of those that choose examples.

    Args:
        config: its ridge and model are the baselines' too.
        data: the examples.
        kept_fraction: of the training examples, those with the smallest losses, that trimming
            keeps: as many as the method that it stands beside.
        models_of: from `trained`, where it is known.
    """
    models_of = trained(config, data) if models_of is None else models_of
    net = models.net(config, data)
    found = {name: _accuracy(y, data, net) for name, y in models_of.items()}
    num_train = len(data.train.labels)
    num_kept = max(round(kept_fraction * num_train), 1)
    for name, scorer in (("trimming", "both"), ("trimming_validation", "validation")):
        losses = np.asarray(net.losses(models_of[scorer], data.train))
        kept = np.zeros(num_train, bool)
        kept[np.argsort(losses, kind="stable")[:num_kept]] = True
        found[name] = _accuracy(_trained(config, data, net, kept, 1), data, net) | {
            "f1_true_labels": cleaning.f1(kept, data.is_right),
            "f1_drawn": cleaning.f1(kept, ~data.is_drawn),
            "kept_fraction": num_kept / num_train,
        }
    return found


def _accuracy(y: PyTree, data: data_lib.Data, net: models.Net) -> dict[str, Any]:
    return {"test_accuracy": float(models.accuracy(y, data.test, net.right))}


def _trained(
    config: settings.CleaningConfig,
    data: data_lib.Data,
    net: models.Net,
    train: np.ndarray | float,
    validation: float,
) -> PyTree:
    """By weights of the training examples, and of all validation examples."""
    num_train, num_validation = len(data.train.labels), len(data.validation.labels)
    batch = models.both(data.train, data.validation)
    weights = np.concatenate(
        [np.broadcast_to(train, num_train), np.broadcast_to(validation, num_validation)]
    )
    return models.train(
        net.params,
        batch,
        weights.astype(np.float32),
        config.lower.ridge,
        num_steps=config.retrain_steps,
        losses=net.losses,
    )
