"""CoLA of GLUE: a logistic head on hashed words in place of an encoder's features, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "cola"
    experiment.data.features = "hashed"
    experiment.model.name = "bag_of_words"
    experiment.local = "virtual"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 8
    experiment.budget = 4
    experiment.epochs = 10
    experiment.optimizer.learning_rate = 1.0
    experiment.optimizer.schedule = "cosine"
    experiment.best_by = "matthews"
    experiment.best_mode = "max"
    return experiment
