"""The bilevel job: half of the digits' training labels are drawn anew; weights tell which.

On four workers, emulated at speeds 4:2:1:1; 100 hypergradients are 1,800 rounds.
"""

import ml_collections

from experiments.bilevel import settings


def get_config() -> ml_collections.ConfigDict:
    cleaning = settings.base()
    cleaning.estimator.steps = 5
    cleaning.cluster.secs_per_microbatch = (0.0005, 0.001, 0.002, 0.002)
    return cleaning
