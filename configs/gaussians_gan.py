"""Adversarial learning: a generator of eight Gaussians against a discriminator.

By a value gap; --config.estimator.name=unrolled or implicit_neumann for the other families.
"""

import ml_collections

from experiments.bilevel import settings


def get_config() -> ml_collections.ConfigDict:
    config = settings.base()
    config.problem = "gan"
    config.lower.optimizer = "momentum"
    config.lower.learning_rate = 0.05
    config.lower.ridge = 0.0
    config.upper.learning_rate = 0.003
    config.upper.steps = 5_000
    config.upper.last_rate = 0.02
    config.eval_every = 250
    config.estimator.steps = 3
    config.estimator.products = 3
    config.estimator.damp = 0.0
    return config
