"""SST-2 of GLUE: a logistic head on 768 features by SVD in place of an encoder's, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "sst2"
    experiment.data.features = "svd"
    experiment.model.name = "logistic"
    experiment.local = "virtual"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 8
    experiment.budget = 4
    experiment.epochs = 3
    experiment.optimizer.learning_rate = 0.01
    experiment.optimizer.schedule = "cosine"
    experiment.best_by = "accuracy"
    experiment.best_mode = "max"
    return experiment
