"""MNIST with logistic regression, a convex problem, on four workers at their own speeds."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "mnist"
    experiment.model.name = "logistic"
    experiment.microbatch_size = 32
    experiment.budget = 16
    experiment.epochs = 10
    return experiment
