"""Few-shot learning: a start from which a few steps on ten points fit a new sinusoid.

By a value gap; for MAML: --config.estimator.name=unrolled --config.estimator.steps=1
--config.lower.optimizer=sgd.
"""

import ml_collections

from experiments.bilevel import settings


def get_config() -> ml_collections.ConfigDict:
    config = settings.base()
    config.problem = "few_shot"
    config.lower.optimizer = "clipped"
    config.lower.learning_rate = 0.01
    config.upper.learning_rate = 0.001
    config.upper.steps = 10_000
    config.eval_every = 500
    return config
