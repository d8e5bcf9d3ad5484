"""The arms of `checkouts`: what each of them runs, as JSON.

An arm has a `name`, the number of `processes`, a `task` of `checkout_tasks`, the `fields` of its
runs' configuration, and what else its task asks for.
"""

import random
from typing import Any

from experiments.drills import fault_cases, faults

_LOCALS = ("stepped", "fused", "virtual")
_NUM_PROCESSES = 2

Arm = dict[str, Any]

_SPEEDS = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
_CHANGES = [
    {"round": 1, "worker": 0, "secs_per_microbatch": 3.0},
    {"round": 2, "worker": 1, "present": False},
    {"round": 4, "worker": 1, "present": True},
]
_ADAPTIVE = {"quota.policy": "adaptive", "cluster": _SPEEDS}
_STATIC = {"quota.policy": "static", "quota.proportions": [4, 3, 2, 1]}
_VARIANTS: dict[str, dict[str, Any]] = {
    "static": {
        "quota.policy": "static",
        "quota.proportions": [4, 3, 1, 0],
        "cluster": {"num_workers": 4},
    },
    "adaptive": {**_ADAPTIVE, "cluster": {**_SPEEDS, "changes": _CHANGES}},
    "quorum": {**_ADAPTIVE, "gate.trigger": "quorum", "gate.quorum": 5},
    "first": {
        **_STATIC,
        "cluster": _SPEEDS,
        "gate.trigger": "first",
        "gate.in_flight": "drop",
    },
    "deadline": {
        **_ADAPTIVE,
        "cluster": {**_SPEEDS, "delay": "exponential"},
        "gate.trigger": "deadline",
        "gate.deadline_secs": 4.0,
    },
}


def arms() -> list[Arm]:
    """All of them; the kind is the first part of a name, but for plain runs of `fit`."""
    return [*of_fit(), *_of_levels(), *_of_loops()]


def kind_of(arm: Arm) -> str:
    """What the tables count together."""
    first, second = arm["name"].split("/")[:2]
    processes = arm["processes"]
    title = f"{second}, " if first.isdigit() else f"{first}, "
    return f"{title}{processes} process{'es' if processes != 1 else ''}"


def of_fit() -> list[Arm]:
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
        name for name in _VARIANTS if local != "fused" or "gate.trigger" not in _VARIANTS[name]
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
        "ordering.herding_every": 1 if index % 6 == 0 else 0,
        "reducer.name": reducer,
        "checkpoint.every_rounds": 1,
        "checkpoint.keep": 1000,
        **_VARIANTS[variant],
    }
    if sharing == "private":
        fields["data.weighting"] = rng.choice(("shard", "example", "shard_mean"))
    if local == "virtual" and variant == "static":
        fields["cluster"] = _SPEEDS
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


_LEVELS = (
    "1/virtual/value_gap/all_reduce/shared/adaptive",
    "1/stepped/value_gap/d_psgd/shared/quorum",
    "1/virtual/value_gap/matcha/private/static",
    "1/stepped/value_gap/ring/private/first",
    "1/fused/value_gap/all_reduce/private/adaptive",
    "1/virtual/central/d_psgd/private/adaptive",
    "1/stepped/dynamic/all_reduce/shared/deadline",
    "1/stepped/cg/all_reduce/shared/first",
    "1/virtual/cg/ring/private/adaptive",
    "1/fused/cg/all_reduce/shared/static",
    "1/stepped/neumann/all_reduce/shared/adaptive",
    "1/virtual/reverse/all_reduce/shared/quorum",
    "1/stepped/checkpointed/ring/private/static",
    "1/virtual/forward/all_reduce/shared/adaptive",
    "1/stepped/worst/all_reduce/private/adaptive",
    "1/virtual/worst/ring/shared/deadline",
    "1/virtual/aggregated/all_reduce/private/static",
    "1/stepped/value_gap_varying/all_reduce/shared/adaptive",
    "1/virtual/value_gap_varying/d_psgd/private/quorum",
    "1/virtual/cg_varying/all_reduce/private/static",
    "1/stepped/reverse_varying/ring/shared/first",
    "2/stepped/value_gap/d_psgd/shared/adaptive",
    "2/fused/value_gap_varying/all_reduce/private/static",
    "2/stepped/cg/all_reduce/shared/first",
    "2/stepped/worst/ring/private/adaptive",
)


def _of_levels() -> list[Arm]:
    """Runs of `fit_bilevel`: PROCESSES/LOCAL/ESTIMATOR/REDUCER/SHARING/QUOTAS."""
    found = []
    for index, name in enumerate(_LEVELS):
        processes, local, estimator, reducer, sharing, variant = name.split("/")
        fields = {
            **_common(local, reducer, sharing, variant),
            "outer_steps": 3,
            "eval_every": 1 + index % 2,
            "microbatch_size": 2,
            "examples_apart": "skip",
            "lower.budget": 6,
            "upper.budget": 6,
        }
        if sharing == "private":
            weightings = ("shard", "example", "shard_mean")
            fields["data.weighting"] = weightings[index % 3]
        if index % 2:
            fields["lower.ordering.method"] = "shuffle_once"
        found.append(
            {
                "name": f"bilevel/{name}",
                "processes": int(processes),
                "task": "cut",
                "estimator": estimator,
                "optimizer": ("sgd", "adam")[index % 3 == 2],
                "cut_round": 1,
                "fields": fault_cases.nested(fields),
            }
        )
    return found


def _common(local: str, reducer: str, sharing: str, variant: str) -> dict[str, Any]:
    fields = {
        "local": local,
        "reducer.name": reducer,
        "data.sharing": sharing,
        "checkpoint.every_rounds": 1,
        "checkpoint.keep": 1000,
        **_VARIANTS[variant],
    }
    if local == "virtual" and variant == "static":
        fields["cluster"] = _SPEEDS
    return fields


_LOOPS = (
    "1/virtual/update/d_psgd/shared/adaptive",
    "1/stepped/update/all_reduce/private/first",
    "1/fused/update/ring/shared/static",
    "1/virtual/steps/d_psgd/private/quorum",
    "1/stepped/steps/all_reduce/shared/adaptive",
    "1/virtual/sums/all_reduce/private/static",
    "1/stepped/sums/ring/shared/quorum",
    "1/fused/sums/all_reduce/shared/adaptive",
    "2/stepped/update/matcha/private/adaptive",
    "2/stepped/sums/all_reduce/shared/first",
)


def _of_loops() -> list[Arm]:
    """Rounds of `Run` in a loop of one's own: PROCESSES/LOCAL/WHAT/REDUCER/SHARING/QUOTAS."""
    found = []
    for index, name in enumerate(_LOOPS):
        processes, local, what, reducer, sharing, variant = name.split("/")
        fields = {
            **_common(local, reducer, sharing, variant),
            "epochs": 3,
            "microbatch_size": 4,
            "budget": 8,
            "ordering.method": "grab" if what == "steps" else "random_reshuffling",
        }
        found.append(
            {
                "name": f"loop/{name}",
                "processes": int(processes),
                "task": "loop",
                "kinds": {"update": ["main", "product"], "steps": ["main"], "sums": ["product"]}[
                    what
                ],
                "model": ("logistic", "mlp")[index % 2],
                "optimizer": ("sgd", "adam")[index % 3 == 2],
                "num_examples": 51,
                "fields": fault_cases.nested(fields),
            }
        )
    return found
