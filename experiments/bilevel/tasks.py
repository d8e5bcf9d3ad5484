"""What `compare_bilevel` compares in cleaning: data sets, and each family's settings.

Steps, multipliers and rates were chosen on seeds 100 to 104 of the digits. On Fashion-MNIST they
were chosen on seeds 100 to 102, by F1 of the training examples that were not drawn: at a lower
learning rate of 0.1, two strengths of each method (multiplier 1 or 3, of the central one 3 or 10;
damp 0.01 or 0.1; 5 or 10 steps back), and the number of upper steps. The value gap was also tried
with lower rates of 0.05 and upper rates of 0.3; none was better. Beside 500 unrolled steps it has
those that soonest reached a validation loss of 0.57, near which RHG ends, on seeds 100 and 101:
their F1 is lower. Of the upper rate of 100 unrolled steps, 0.3 and 1 were tried, 0.3 on seed 100
alone; 500 steps and those down both losses take it from there. The start rate of the worst iterate
was chosen from 0.001, 0.003 and 0.01 on seed 100 alone. The first order is as on the digits.

The network's were chosen on seed 100 alone. Plain gradient descent at a rate of 0.4 left F at 0.495
after 100 steps of the value gap at an upper rate of 0.1, at 0.613 after 60 at 0.3, where momentum
had it at 0.416 after 60; so all lower steps have momentum. With it, multipliers of 1 and 3 and
damps of 0.01 and 0.1 were tried (F1 94.5 and 94.7; 74.7 and 93.3); the others have what they have
on the digits. Reported are other seeds.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from experiments.bilevel import baselines as baselines_lib
from experiments.bilevel import cleaning, settings
from experiments.bilevel import data as data_lib
from hetjax.types import PyTree

Fields = dict[str, Any]  # of a configuration
RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


class Task(NamedTuple):
    name: str
    title: str
    fields: Fields
    seeds: tuple[int, ...]
    arms: dict[str, Fields]

    def config(self, arm: str, seed: int, data_dir: str | None) -> settings.CleaningConfig:
        """Of one run."""
        given: dict[str, Any] = {"seed": seed}
        for fields in (self.fields, self.arms[arm]):
            for name, value in fields.items():
                is_group = isinstance(value, dict)
                given[name] = given.get(name, {}) | value if is_group else value
        given["data"] = given.get("data", {}) | {"dir": data_dir or ""}
        return settings.validate(given)


def _arm(name: str, **options: Any) -> Fields:
    return {"estimator": {"name": name, **options}}


_ARMS = {
    "value_gap": _arm("value_gap"),
    "value_gap_central": _arm("value_gap_central", multiplier=10.0),
    "implicit_cg": _arm("implicit_cg"),
    "implicit_neumann": _arm("implicit_neumann"),
    "unrolled": _arm("unrolled", steps=100, start="cold"),
    "unrolled_truncated": _arm("unrolled_truncated"),
    "unrolled_aggregate": _arm("unrolled_aggregate", steps=100, start="cold"),
    "unrolled_worst": _arm("unrolled_worst", steps=30),
    "first_order": _arm("first_order"),
}
_FASHION: Fields = {
    "data": {"name": "fashion_mnist", "num_train": 5000, "num_validation": 5000, "block_size": 50},
    "lower": {"learning_rate": 0.1, "ridge": 1e-3},
}


def _tuned(name: str, num_steps: int, **options: Any) -> Fields:
    return _arm(name, **options) | {"upper": {"steps": num_steps}}


_FEW = {"upper": {"learning_rate": 1.0, "steps": 20}, "eval_every": 1}
_ON_FASHION: dict[str, Fields] = {
    "value_gap": _tuned("value_gap", 60, multiplier=3.0),
    "value_gap_central": _tuned("value_gap_central", 70, multiplier=10.0),
    "implicit_cg": _tuned("implicit_cg", 60),
    "implicit_neumann": _tuned("implicit_neumann", 65),
    "unrolled": _arm("unrolled", steps=100, start="cold") | _FEW,
    "unrolled_truncated": _tuned("unrolled_truncated", 70, back=10),
    "unrolled_aggregate": _arm("unrolled_aggregate", steps=100, start="cold") | _FEW,
    "unrolled_worst": _tuned("unrolled_worst", 50, steps=30, start_learning_rate=0.003),
    "first_order": _tuned("first_order", 60),
}
_LONG: dict[str, Fields] = {
    "value_gap": _arm("value_gap")
    | {"upper": {"learning_rate": 0.3, "steps": 40}, "eval_every": 1},  # for time, not for F1
    "unrolled": _arm("unrolled", steps=500, start="cold")
    | _FEW
    | {"upper": {"learning_rate": 1.0, "steps": 6}},
    "unrolled_checkpointed": _arm("unrolled_checkpointed", steps=500, start="cold")
    | _FEW
    | {"upper": {"learning_rate": 1.0, "steps": 1}},
}
_MLP: Fields = {
    "model": {"name": "mlp"},
    "data": _FASHION["data"] | {"block_size": 250},
    "lower": {"optimizer": "momentum", "learning_rate": 0.1, "ridge": 1e-4},
    "upper": {"learning_rate": 0.1, "steps": 60},
}
_ON_MLP: dict[str, Fields] = {
    "value_gap": _arm("value_gap", multiplier=3.0),
    "value_gap_central": _arm("value_gap_central", multiplier=10.0),
    "implicit_cg": _arm("implicit_cg", damp=0.1),
    "implicit_neumann": _arm("implicit_neumann"),
    "unrolled": _arm("unrolled", steps=100, start="cold") | _FEW,
    "unrolled_truncated": _arm("unrolled_truncated"),
    "unrolled_aggregate": _arm("unrolled_aggregate", steps=100, start="cold") | _FEW,
    "unrolled_worst": _tuned("unrolled_worst", 50, steps=30),
    "first_order": _arm("first_order"),
}
TASKS = {
    task.name: task
    for task in (
        Task(
            "digits_400",
            "Digits, 600 polluted, 400 validation, 797 test",
            {"data": {"num_validation": 400}},
            (0, 1, 2, 3, 4),
            _ARMS,
        ),
        Task(
            "digits_100",
            "Digits, 600 polluted, 100 validation, 797 test",
            {"data": {"num_validation": 100, "num_test": 797}},
            (0, 1, 2, 3, 4),
            _ARMS,
        ),
        Task(
            "fashion_linear",
            "Fashion-MNIST, softmax regression, 5,000 / 5,000 / 10,000",
            _FASHION,
            (0, 1, 2, 3, 4),
            _ON_FASHION,
        ),
        Task(
            "fashion_long", "Fashion-MNIST, against 500 unrolled steps", _FASHION, (0, 1, 2), _LONG
        ),
        Task(
            "fashion_mlp",
            "Fashion-MNIST, 784-300-10 network, 5,000 / 5,000 / 10,000",
            _MLP,
            (0, 1, 2),
            _ON_MLP,
        ),
    )
}


def run(task: Task, arm: str, seed: int, data_dir: str | None) -> dict[str, Any]:
    """One run with its baselines, as a record.

    Raises:
        ValueError: the data are missing.
    """
    config = task.config(arm, seed, data_dir)
    data = data_lib.make(config.data, seed)
    found = cleaning.clean(config, data)
    summary = found.summary | {"arm": arm, "seed": seed}
    summary.pop("weights")
    summary["baselines"] = baselines_lib.run(
        config, data, summary["kept_fraction"], _trained(_without_method(config))
    )
    if arm == "value_gap" and config.data.name == "digits":
        summary["best_ridge"] = best_ridge(config, data, summary["kept_fraction"])
    names = ("train_secs", "work", "test_accuracy", "validation_loss", "f1_true_labels")
    summary["curve"] = {name: [line[name] for line in found.history] for name in names}
    plain = settings.to_dict(config)
    plain["data"].pop("dir")
    return {**summary, "settings": plain}


def _without_method(config: settings.CleaningConfig) -> settings.CleaningConfig:
    """What the baselines of all arms of a seed have in common."""
    defaults = settings.CleaningConfig()
    return dataclasses.replace(
        config,
        eval_every=defaults.eval_every,
        lower=dataclasses.replace(defaults.lower, ridge=config.lower.ridge),
        upper=defaults.upper,
        estimator=defaults.estimator,
    )


@functools.lru_cache(maxsize=1)
def _trained(config: settings.CleaningConfig) -> dict[str, PyTree]:
    return baselines_lib.trained(config, data_lib.make(config.data, config.seed))


def best_ridge(
    config: settings.CleaningConfig, data: data_lib.Data, kept_fraction: float
) -> dict[str, float]:
    """Training on both and trimming, by whichever of `RIDGES` serves each best on the test set.

    More than is fair: no method may look there.
    """
    found = []
    for ridge in RIDGES:
        own = dataclasses.replace(config, lower=dataclasses.replace(config.lower, ridge=ridge))
        of_ridge = baselines_lib.run(own, data, kept_fraction)
        found.append(
            {
                "both": of_ridge["both"]["test_accuracy"],
                "trimming_f1_true_labels": of_ridge["trimming"]["f1_true_labels"],
                "trimming_f1_drawn": of_ridge["trimming"]["f1_drawn"],
            }
        )
    return {name: max(each[name] for each in found) for name in found[0]}
