"""WikiText-2 with two layers of LSTM, 32 wide, and a tied embedding of 10,000 words, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "wikitext2"
    experiment.data.vocabulary = 10_000
    experiment.data.length = 35
    experiment.model.name = "lstm"
    experiment.model.hidden = (32, 32)
    experiment.local = "virtual"
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 4
    experiment.budget = 4
    experiment.epochs = 3
    experiment.optimizer.learning_rate = 20.0
    experiment.optimizer.momentum = 0.0
    experiment.optimizer.clip_norm = 0.25
    experiment.optimizer.schedule = "linear"
    experiment.best_by = "perplexity"
    return experiment
