"""Fashion-MNIST on eight equal workers that are held up at random, on the virtual clock.

In each round a worker takes its 80 ms of computing and an exponential delay of the same mean.
"""

import ml_collections

from hetjax.zoo import config


def get_config() -> ml_collections.ConfigDict:
    experiment = config.base()
    experiment.data.name = "fashion_mnist"
    experiment.data.num_train = 12_000
    experiment.model.name = "mlp"
    experiment.model.hidden = (128,)
    experiment.local = "virtual"
    experiment.epochs = 12
    experiment.microbatch_size = 4
    experiment.budget = 64
    experiment.quota.policy = "equal"
    experiment.reducer.graph = "exponential"
    experiment.cluster.num_workers = 8
    experiment.cluster.secs_per_microbatch = (0.02,) * 8  # the mean; 0.01 of it is sure
    experiment.cluster.delay = "shifted_exponential"
    experiment.cluster.delay_per = "round"
    experiment.cluster.clock = "virtual"
    return experiment
