"""CIFAR-10 with LeNet (62,006 parameters) on four workers at their own speeds."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "cifar10"
    experiment.model.name = "lenet"
    experiment.microbatch_size = 32
    experiment.budget = 16
    experiment.epochs = 30
    experiment.optimizer.schedule = "cosine"
    experiment.optimizer.warmup_epochs = 1.0
    return experiment
