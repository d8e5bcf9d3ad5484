"""CIFAR-10 with LeNet as the papers train it: batches of 64, no augmentation, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "cifar10"
    experiment.model.name = "lenet"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 16
    experiment.budget = 4
    experiment.epochs = 12
    experiment.optimizer.learning_rate = 0.02
    experiment.optimizer.weight_decay = 1e-3
    experiment.optimizer.schedule = "cosine"
    experiment.best_by = "accuracy"
    experiment.best_mode = "max"
    return experiment
