"""The weekly series of the M4 with a perceptron that continues its own forecasts, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "m4_weekly"
    experiment.model.name = "forecaster"
    experiment.model.hidden = (64, 64, 64)
    experiment.local = "virtual"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 16
    experiment.budget = 4
    experiment.epochs = 5
    experiment.optimizer.name = "adam"
    experiment.optimizer.learning_rate = 1e-3
    experiment.optimizer.schedule = "cosine"
    experiment.best_by = "smape"
    return experiment
