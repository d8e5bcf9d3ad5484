"""Fashion-MNIST with a multilayer perceptron on four workers at their own speeds."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "fashion_mnist"
    experiment.model.name = "mlp"
    experiment.model.hidden = (256, 128)
    experiment.microbatch_size = 32
    experiment.budget = 16
    return experiment
