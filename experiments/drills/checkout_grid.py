"""The arms of `checkouts` that train by `fit` alone: every combination that works together."""

import random
from typing import Any

from experiments.drills import fault_cases, faults

Arm = dict[str, Any]

_LOCALS = ("stepped", "fused", "virtual")
_NUM_PROCESSES = 2

SPEEDS = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
_CHANGES = [
    {"round": 1, "worker": 0, "secs_per_microbatch": 3.0},
    {"round": 2, "worker": 1, "present": False},
    {"round": 4, "worker": 1, "present": True},
]
_ADAPTIVE = {"quota.policy": "adaptive", "cluster": SPEEDS}
_STATIC = {"quota.policy": "static", "quota.proportions": [4, 3, 2, 1]}
VARIANTS: dict[str, dict[str, Any]] = {
    "static": {
        "quota.policy": "static",
        "quota.proportions": [4, 3, 1, 0],
        "cluster": {"num_workers": 4},
    },
    "adaptive": {**_ADAPTIVE, "cluster": {**SPEEDS, "changes": _CHANGES}},
    "quorum": {**_ADAPTIVE, "gate.trigger": "quorum", "gate.quorum": 5},
    "first": {
        **_STATIC,
        "cluster": SPEEDS,
        "gate.trigger": "first",
        "gate.in_flight": "drop",
    },
    "deadline": {
        **_ADAPTIVE,
        "cluster": {**SPEEDS, "delay": "exponential"},
        "gate.trigger": "deadline",
        "gate.deadline_secs": 4.0,
    },
}


def arms() -> list[Arm]:
    """Every combination that works together, in one process and in several.

    Quotas and gates take turns; model, optimiser, feed and weighting are drawn for each arm.
    """
    found = []
    pairs = list(dict.fromkeys((o, r) for _, o, r in faults.combinations()))
    for processes in (1, _NUM_PROCESSES):
        for local in _LOCALS if processes == 1 else ("stepped", "fused"):
            for index, (ordering, reducer) in enumerate(pairs):
                both = ("shared", "private")
                for sharing in both if processes == 1 else both[index // 2 % 2 :][:1]:
                    found.append(_arm(processes, local, ordering, reducer, sharing, index))
    return found


def _arm(processes: int, local: str, ordering: str, reducer: str, sharing: str, index: int) -> Arm:
    turn = index + _LOCALS.index(local) + 2 * (processes > 1) + (sharing == "private")
    variants = [
        name for name in VARIANTS if local != "fused" or "gate.trigger" not in VARIANTS[name]
    ]
    variant = variants[turn % len(variants)]
    name = f"{processes}/{local}/{ordering}/{reducer}/{sharing}/{variant}"
    rng = random.Random(name)
    fields: dict[str, Any] = {
        "epochs": 3,
        "microbatch_size": 4,
        "budget": 8,
        "local": local,
        "data.sharing": sharing,
        "data.feed": rng.choice(("resident", "resident", "streamed")),
        "ordering.method": ordering,
        "reducer.name": reducer,
        "checkpoint.every_rounds": 1,
        "checkpoint.keep": 1000,
        **VARIANTS[variant],
    }
    if sharing == "private":
        fields["data.weighting"] = rng.choice(("shard", "example", "shard_mean"))
    if local == "virtual" and variant == "static":
        fields["cluster"] = SPEEDS
    return {
        "name": name,
        "processes": processes,
        "task": "cut",
        "model": rng.choice(("logistic", "mlp")),
        "optimizer": rng.choice(("sgd", "sgd", "adam")),
        "num_examples": 51,
        "cut_round": 2,
        "fields": fault_cases.nested(fields),
    }
