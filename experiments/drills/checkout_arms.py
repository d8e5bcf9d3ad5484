"""The arms of `checkouts`: what each of them runs, as JSON.

An arm has a `name`, the number of `processes`, a `task` of `checkout_tasks` or
`checkout_workdirs`, the `fields` of its runs' configuration, and what else its task asks for.
"""

from typing import Any

from experiments.drills import checkout_grid, fault_cases
from experiments.drills.checkout_grid import SPEEDS, VARIANTS, Arm


def arms() -> list[Arm]:
    """All of them, those of one process first; kinds but plain runs of `fit` begin a name."""
    found = [
        *checkout_grid.arms(),
        *_of_levels(),
        *_of_loops(),
        *_of_blocks(),
        *_of_sets(),
        *_of_weights(),
        *_of_replays(),
        *_of_workdirs(),
    ]
    return sorted(found, key=lambda arm: arm["processes"])


def kind_of(arm: Arm) -> str:
    """What the tables count together."""
    first, second = arm["name"].split("/")[:2]
    processes = arm["processes"]
    title = f"{second}, " if first.isdigit() else f"{first}, "
    return f"{title}{processes} process{'es' if processes != 1 else ''}"


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
    return [_of_two_levels("bilevel", name, index) for index, name in enumerate(_LEVELS)]


def _of_two_levels(kind: str, name: str, index: int) -> Arm:
    processes, local, estimator, reducer, sharing, variant = name.split("/")
    fields = {
        **_common(local, reducer, sharing, variant),
        "outer_steps": 3 if processes == "1" else 4,  # several processes end a step later
        "eval_every": 1 + index % 2,
        "microbatch_size": 2,
        "lower.budget": 6,
        "upper.budget": 6,
    }
    if sharing == "private":
        weightings = ("shard", "example", "shard_mean")
        fields["data.weighting"] = weightings[index % 3]
    if index % 2:
        fields["lower.ordering.method"] = "shuffle_once"
    return {
        "name": f"{kind}/{name}",
        "processes": int(processes),
        "task": "cut",
        "estimator": estimator,
        "optimizer": ("sgd", "adam")[index % 3 == 2],
        "cut_round": 1,
        "fields": fault_cases.nested(fields),
    }


def _common(local: str, reducer: str, sharing: str, variant: str) -> dict[str, Any]:
    fields = {
        "local": local,
        "reducer.name": reducer,
        "data.sharing": sharing,
        "checkpoint.every_rounds": 1,
        "checkpoint.keep": 1000,
        **VARIANTS[variant],
    }
    if local == "virtual" and variant == "static":
        fields["cluster"] = SPEEDS
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


_BLOCKS = (
    "1/stepped/d_grab/all_reduce/shared/adaptive",
    "1/virtual/d_grab/ring/private/static",
    "1/fused/d_grab/all_reduce/shared/static",
    "1/stepped/pair_balance/d_psgd/private/first",
    "1/virtual/pair_balance/matcha/shared/quorum",
    "1/virtual/frozen/all_reduce/shared/deadline",
    "1/fused/pair_balance/d_psgd/private/adaptive",
    "2/stepped/d_grab/ring/shared/quorum",
    "2/fused/frozen/all_reduce/private/static",
)


def _of_blocks() -> list[Arm]:
    """Orders that sign several blocks of a microbatch: of 4, 4 and 2 examples."""
    several = {"microbatch_size": 10, "ordering.block_pairs": 2}
    return [
        _of_one_level("blocks", name, index, several, num_examples=150)
        for index, name in enumerate(_BLOCKS)
    ]


def _of_one_level(kind: str, name: str, index: int, more: dict[str, Any], **own: Any) -> Arm:
    """A run of `fit`: PROCESSES/LOCAL/WHAT/REDUCER/SHARING/QUOTAS, where WHAT may be an order."""
    processes, local, what, reducer, sharing, variant = name.split("/")
    fields = {
        **_common(local, reducer, sharing, variant),
        "epochs": 3,
        "microbatch_size": 4,
        "budget": 8,
        **more,
    }
    if what in _ORDERS:
        fields["ordering.method"] = what
    if sharing == "private":
        fields["data.weighting"] = ("shard", "example", "shard_mean")[index % 3]
    return {
        "name": f"{kind}/{name}",
        "processes": int(processes),
        "task": "cut",
        "model": ("mlp", "logistic")[index % 2],
        "optimizer": ("sgd", "adam")[index % 3 == 1],
        "num_examples": 51,
        "cut_round": 2,
        "fields": fault_cases.nested(fields),
        **own,
    }


_ORDERS = ("d_grab", "pair_balance", "frozen", "grab", "random_reshuffling")
_SETS = (
    "1/stepped/accuracy/all_reduce/shared/adaptive",
    "1/virtual/test_weighted/d_psgd/private/quorum",
    "1/fused/val_loss/ring/shared/static",
    "1/virtual/test_perplexity/matcha/shared/first",
    "2/stepped/test_accuracy/d_psgd/shared/adaptive",
)


def _of_sets() -> list[Arm]:
    """Two sets, metrics with and without weights, and the best by one of them."""
    found = []
    for index, name in enumerate(_SETS):
        metric = name.split("/")[2]
        is_low = metric.endswith(("loss", "perplexity"))
        fields = {"best_by": metric, "best_mode": "min" if is_low else "max"}
        every = {"eval_every_rounds": 2 * (index % 2), "eval_every": 1 + (index == 2)}
        found.append(_of_one_level("sets", name, index, {**fields, **every}, has_sets=True))
    return found


_WEIGHTS = (
    "1/stepped/varying/all_reduce/shared/first",
    "1/virtual/varying/d_psgd/private/quorum",
    "1/fused/varying/ring/private/adaptive",
    "1/virtual/varying/matcha/shared/deadline",
    "2/stepped/varying/all_reduce/private/quorum",
    "1/stepped/weighted/all_reduce/private/first",
    "1/fused/weighted/d_psgd/shared/static",
    "1/virtual/weighted/all_reduce/shared/adaptive",
    "2/fused/weighted/ring/shared/adaptive",
    "1/stepped/spoiled/all_reduce/shared/first",
    "1/virtual/spoiled/d_psgd/private/quorum",
    "1/fused/spoiled/ring/shared/adaptive",
    "2/stepped/spoiled/all_reduce/shared/deadline",
)


def _of_weights() -> list[Arm]:
    """Losses with weights, constant or not, and with examples that are not finite."""
    found = []
    for index, name in enumerate(_WEIGHTS):
        _, _, what, reducer, *_ = name.split("/")
        fields: dict[str, Any] = {}
        if what != "varying":
            gossips = reducer in ("d_psgd", "matcha")
            fields["ordering.method"] = "pair_balance" if gossips else "d_grab"
        if what == "spoiled":
            fields["nonfinite"] = "skip"
            own: dict[str, Any] = {"spoiled": 3}
        else:
            own = {"loss": what}
        kind = "nonfinite" if what == "spoiled" else "weights"
        found.append(_of_one_level(kind, name, index, fields, **own))
    return found


_REPLAYS = (
    "1/stepped/grab/all_reduce/shared/deadline/whole",
    "1/fused/random_reshuffling/d_psgd/private/adaptive/cut",
    "1/virtual/d_grab/ring/shared/quorum/short",
    "2/stepped/pair_balance/matcha/shared/quorum/whole",
    "1/stepped/value_gap/all_reduce/shared/deadline/whole",
    "1/virtual/cg/ring/private/adaptive/cut",
    "1/stepped/value_gap/d_psgd/shared/quorum/short",
    "2/stepped/worst/all_reduce/private/adaptive/whole",
)


def _of_replays() -> list[Arm]:
    """A run on the virtual clock, and its trace replayed: whole, cut, or one that ends early."""
    found = []
    for index, name in enumerate(_REPLAYS):
        name, _, how = name.rpartition("/")
        arm = _of_any("replay", name, index)
        traced = dict(arm["fields"])
        if arm["processes"] == 1:
            traced["local"] = "virtual"  # which no other process takes part in
        arm["fields"] = {**arm["fields"], "cluster": {"num_workers": 4}}
        if how == "short":
            traced |= {"outer_steps": 2} if "estimator" in arm else {"max_rounds": 4}
        arm |= {"name": f"{arm['name']}/{how}", "task": "replay", "traced": traced}
        if how != "cut":
            del arm["cut_round"]
        found.append(arm)
    return found


def _of_any(kind: str, name: str, index: int) -> Arm:
    """A run of `fit` or, where an estimator is named and no order, of `fit_bilevel`."""
    if name.split("/")[2] in _ORDERS:
        return _of_one_level(kind, name, index, {})
    return _of_two_levels(kind, name, index)


_WORKDIRS = (
    "1/stepped/d_grab/all_reduce/shared/adaptive",
    "1/virtual/pair_balance/d_psgd/private/quorum",
    "1/fused/grab/matcha/shared/static",
    "2/stepped/random_reshuffling/ring/private/first",
    "1/stepped/value_gap/d_psgd/shared/adaptive",
    "1/virtual/cg/all_reduce/private/static",
    "1/virtual/worst/ring/shared/quorum",
    "2/stepped/value_gap_varying/all_reduce/shared/adaptive",
)


def _of_workdirs() -> list[Arm]:
    """What the earlier version has cut, the later one goes on with, loads and reports."""
    return [
        {**_of_any("workdir", name, index), "task": "go on"} for index, name in enumerate(_WORKDIRS)
    ]
