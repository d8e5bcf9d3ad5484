"""What `compare_bilevel` compares in cleaning: data sets, and each family's settings.

Steps, multipliers and rates were chosen on seeds 100 to 104 of the digits; reported are others.
"""

import dataclasses
from typing import Any, NamedTuple

from experiments.bilevel import baselines as baselines_lib
from experiments.bilevel import cleaning, settings
from experiments.bilevel import data as data_lib

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
    "data": {"name": "fashion_mnist", "num_train": 5000, "num_validation": 5000},
    "lower": {"learning_rate": 0.05, "ridge": 1e-3},
}
_ON_FASHION = (  # those that take less than a minute
    "value_gap",
    "value_gap_central",
    "implicit_cg",
    "implicit_neumann",
    "unrolled_truncated",
    "first_order",
)
_FEW = {"upper": {"learning_rate": 1.0, "steps": 6}, "eval_every": 1}
_LONG: dict[str, Fields] = {
    "value_gap": _arm("value_gap") | {"eval_every": 1},
    "unrolled": _arm("unrolled", steps=500, start="cold") | _FEW,
    "unrolled_checkpointed": _arm("unrolled_checkpointed", steps=500, start="cold")
    | _FEW
    | {"upper": {"learning_rate": 1.0, "steps": 1}},
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
            {name: _ARMS[name] for name in _ON_FASHION},
        ),
        Task("fashion_long", "Fashion-MNIST, against 500 unrolled steps", _FASHION, (0,), _LONG),
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
    summary["baselines"] = baselines_lib.run(config, data, summary["kept_fraction"])
    if arm == "value_gap" and config.data.name == "digits":
        summary["best_ridge"] = best_ridge(config, data, summary["kept_fraction"])
    names = ("train_secs", "work", "test_accuracy", "validation_loss", "f1_true_labels")
    summary["curve"] = {name: [line[name] for line in found.history] for name in names}
    plain = settings.to_dict(config)
    plain["data"].pop("dir")
    return {**summary, "settings": plain}


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
