"""A tiny task of the study of orders, and made results of it."""

from experiments.orders import arms, results
from experiments.orders.tasks import Task

CHANGES = {"cluster.secs_per_microbatch": (), "model.name": "logistic", "local": "virtual"}
CHANGES |= {"data.num_train": 128, "microbatch_size": 4, "budget": 4, "epochs": 3}
FASTEST = ("random_reshuffling", "fixed_map")  # to compile
FIELDS = {"name": "tiny", "title": "Digits", "config": "digits", "learning_rates": (0.05,)}
FIELDS |= {"round_millis": 1.0, "seeds": (0, 1), "every": 2, "num_eval": 32}
TINY = Task(changes=CHANGES, arms=FASTEST, **FIELDS)
BASE, BALANCED = arms.BASELINE, arms.LEADER


def record_of(losses, task=TINY, **fields):
    made = {"train_losses": losses, "metric": "test_accuracy", "epochs": 3, "quotas": []}
    made |= {"task": task.name, "settings": task.settings}
    return made | {"metric_values": [0.5] * len(losses)} | fields


def arms_of(task, losses, secs=()):
    """Arms with the same lowest losses and their last epoch."""
    records = {
        (arm, 0.05, seed): record_of(list(values), task)
        for arm, by_seed in losses.items()
        for seed, values in enumerate(by_seed)
    }
    return results.Arms(task, records, dict.fromkeys(losses, 0.05), dict(secs))
