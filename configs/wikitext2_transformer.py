"""WikiText-2 with a transformer of 2 layers, 2 heads, width 128, and chunks of 128 words, n = 4."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "wikitext2"
    experiment.data.vocabulary = 10_000
    experiment.data.length = 128
    experiment.model.name = "transformer"
    experiment.model.width = 128
    experiment.model.blocks = 2
    experiment.model.heads = 2
    experiment.quota.policy = "equal"
    experiment.microbatch_size = 16
    experiment.budget = 4
    experiment.epochs = 1
    experiment.optimizer.name = "adamw"
    experiment.optimizer.learning_rate = 2e-3
    experiment.optimizer.weight_decay = 0.01
    experiment.optimizer.clip_norm = 1.0
    experiment.optimizer.schedule = "cosine"
    experiment.optimizer.warmup_epochs = 0.1
    experiment.best_by = "perplexity"
    return experiment
