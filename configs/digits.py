"""The main job: the UCI digits on four workers emulated at speeds 4:3:2:1."""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.cluster.secs_per_microbatch = (0.024, 0.032, 0.048, 0.096)
    return experiment
