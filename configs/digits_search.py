"""Architecture search: a DARTS cell whose right operations have to be found among decoys.

By a value gap; --config.estimator.name=unrolled or implicit_cg for the other families, first_order
for DARTS of the first order.
"""

import ml_collections

from experiments.bilevel import settings


def get_config() -> ml_collections.ConfigDict:
    config = settings.base()
    config.problem = "search"
    config.lower.optimizer = "momentum"
    config.lower.learning_rate = 0.05
    config.lower.ridge = 0.01
    config.upper.learning_rate = 0.05
    config.upper.steps = 100
    config.estimator.steps = 5
    config.estimator.multiplier = 3.0
    config.estimator.products = 5
    config.estimator.damp = 0.1
    return config
