"""CIFAR-10 with ResNet-18 and BatchNorm as the field trains it, for workers with a GPU each.

SGD with Nesterov momentum, batches of 128, 200 epochs of a cosine, crops and flips. Microbatches
of 32 are what a BatchNorm's statistics are of.
"""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "cifar10"
    experiment.data.augmentation = "crops_and_flips"
    experiment.model.name = "resnet18"
    experiment.model.norm = "batch"
    experiment.microbatch_size = 32
    experiment.budget = 4
    experiment.epochs = 200
    experiment.optimizer.learning_rate = 0.1
    experiment.optimizer.nesterov = True
    experiment.optimizer.weight_decay = 5e-4
    experiment.optimizer.schedule = "cosine"
    experiment.optimizer.warmup_epochs = 1.0
    experiment.best_by = "accuracy"
    experiment.best_mode = "max"
    return experiment
