"""CIFAR-10 with ResNet-8, 16 channels wide, BatchNorm of 32 examples, batches of 128, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "cifar10"
    experiment.model.name = "resnet8"
    experiment.model.width = 16
    experiment.model.norm = "batch"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 32
    experiment.budget = 4
    experiment.epochs = 22
    experiment.optimizer.learning_rate = 0.1
    experiment.optimizer.weight_decay = 5e-4
    experiment.optimizer.schedule = "cosine"
    experiment.optimizer.warmup_epochs = 1.0
    experiment.best_by = "accuracy"
    experiment.best_mode = "max"
    return experiment
