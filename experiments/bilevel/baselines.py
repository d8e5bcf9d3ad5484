"""What cleaning is compared with; without them its accuracy says little.

Each is a model trained to its minimum on some of the examples, all by the same ridge.
"""

from typing import Any, NamedTuple

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


class Baseline(NamedTuple):
    y: PyTree
    found: dict[str, Any]


def run(
    config: settings.CleaningConfig, data: data_lib.Data, kept_fraction: float
) -> dict[str, dict[str, Any]]:
    """All of them: test accuracy, and F1 of those that choose examples.

    Args:
        config: its ridge and model are the baselines' too.
        data: the examples.
        kept_fraction: of the training examples, those with the smallest losses, that trimming
            keeps: as many as the method that it stands beside.
    """
    num_train, num_validation = len(data.train.labels), len(data.validation.labels)
    batch = models.both(data.train, data.validation)
    params = models.init(config.model, batch.images.shape[1], data.num_classes, config.seed)

    def trained(train: np.ndarray | float, validation: float) -> PyTree:
        weights = np.concatenate(
            [np.broadcast_to(train, num_train), np.broadcast_to(validation, num_validation)]
        )
        return models.train(
            params,
            batch,
            weights.astype(np.float32),
            config.lower.ridge,
            num_steps=config.retrain_steps,
        )

    found = {
        "polluted": Baseline(trained(1, 0), {}),
        "validation": Baseline(trained(0, 1), {}),
        "both": Baseline(trained(1, 1), {}),
        "oracle": Baseline(trained(data.is_right, 1), {}),
    }
    num_kept = max(round(kept_fraction * num_train), 1)
    for name, scorer in (("trimming", "both"), ("trimming_validation", "validation")):
        losses = np.asarray(models.losses(found[scorer].y, data.train))
        kept = np.zeros(num_train, bool)
        kept[np.argsort(losses, kind="stable")[:num_kept]] = True
        apart = {
            "f1_true_labels": cleaning.f1(kept, data.is_right),
            "f1_drawn": cleaning.f1(kept, ~data.is_drawn),
            "kept_fraction": num_kept / num_train,
        }
        found[name] = Baseline(trained(kept, 1), apart)
    return {
        name: {"test_accuracy": float(models.accuracy(each.y, data.test)), **each.found}
        for name, each in found.items()
    }
