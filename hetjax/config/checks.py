"""What must hold between the fields of a configuration, each by itself already right.

`resolve` makes the parts, which say what they need, and applies all rules. Only their factories
check their options.

Every rule returns lines that name the fields, their values, what is allowed and how to mend it.
Left to others: whether there are enough devices (needs jax), whether files and data sets exist.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from hetjax import ordering, quota, topology
from hetjax import parts as parts_lib
from hetjax.config import fields, groups, kinds

_Config = TypeVar("_Config", bound=groups.ExperimentConfig)


def resolve(
    experiment: _Config, given: Mapping[str, Any], *, more: Iterable[str] = ()
) -> tuple[_Config, kinds.Parts]:
    """Makes the parts of a configuration that can be run.

    Args:
      experiment: the configuration.
      given: the parts that were given as objects, by group.
      more: lines about what else is wrong with it.

    Returns:
      the configuration with all options of these parts and of no others, and the parts.

    Raises:
      ValueError: it cannot be run; a line for each contradiction, behind `more`.
    """
    lines = [*more, *_emulation(experiment.cluster), *_rule(experiment.rule), *_local(experiment)]
    try:
        parts = kinds.of_config(experiment, given)
    except ValueError as error:
        lines.append(str(error))
    else:
        lines += _fit(experiment, parts)
        lines += _parts(parts, _facts(experiment))
        lines += _slices(experiment, parts)
    # Presence over rounds means something only once the changes themselves do.
    lines += list(_changes(experiment.cluster)) or _budget(experiment)
    if lines:
        raise ValueError("\n".join(lines))
    return _written(experiment, parts), parts


def _written(experiment: _Config, parts: kinds.Parts) -> _Config:
    """The configuration with the options that its parts were made of, where they are known."""
    changed = {}
    for group, part in parts._asdict().items():
        if made := parts_lib.made_by(part):
            arguments = fields.ARGUMENTS.rule.parse(made.arguments)
            changed[group] = dataclasses.replace(getattr(experiment, group), arguments=arguments)
    return dataclasses.replace(experiment, **changed)


def _facts(experiment: groups.ExperimentConfig) -> parts_lib.Facts:
    """What the run tells its parts."""
    cluster = experiment.cluster
    speeds, overhead = cluster.secs_per_microbatch, cluster.overhead_secs
    starts = overhead if isinstance(overhead, tuple) else (overhead,) * len(speeds)
    shortest = min((a + b for a, b in zip(starts, speeds, strict=False)), default=0.0)
    return parts_lib.Facts(cluster.num_workers, experiment.budget, shortest)


def _parts(chosen: kinds.Parts, facts: parts_lib.Facts) -> Iterator[str]:
    """Why these parts do not work, in a run of these facts or with each other: a line for each."""
    for group, part in zip(chosen._fields, chosen, strict=True):
        ask = getattr(part, "problems", parts_lib.no_problems)
        yield from (f"{group}.{line}" for line in ask(facts))
    yield from _contradictions(chosen.ordering, chosen.reducer)
    yield from kinds.of_two(chosen.ordering, chosen.reducer)
    yield from _idle_worker(chosen, facts)


def _contradictions(order: ordering.Ordering, reducer: topology.Reducer) -> Iterator[str]:
    """What an ordering or a reducer says of itself that cannot be true together."""
    if order.coordinated and order.make_observer is None:
        yield (
            f"ordering.method: {kinds.name_of('ordering', order)!r} says coordinated=True and has "
            "no make_observer."
        )
    said = [
        f"{field}={getattr(reducer, field)}"
        for field in ("gossips", "is_plain_sum", "keeps_replicas_equal")
    ]
    of_sum = reducer.is_plain_sum and (reducer.gossips or not reducer.keeps_replicas_equal)
    if of_sum or (reducer.gossips and reducer.keeps_replicas_equal):
        yield (
            f"reducer.name: {kinds.name_of('reducer', reducer)!r} says {', '.join(said)}, which "
            "contradict each other."
        )


def _idle_worker(chosen: kinds.Parts, facts: parts_lib.Facts) -> Iterator[str]:
    """A gate that waits for a worker to finish its quota: which one, where a quota is 0?"""
    proportions = chosen.quota.proportions
    if not chosen.gate.needs_quotas or proportions is None:
        return
    if len(proportions) != facts.num_workers or not sum(proportions) > 0:
        return  # the policy has said so
    quotas = quota.largest_remainder(proportions, facts.budget)
    idle = [worker for worker, count in enumerate(quotas) if count == 0]
    if idle:
        yield (
            f"gate.trigger: got {kinds.name_of('gate', chosen.gate)!r}, but worker {idle[0]} has a "
            f"quota of 0 by quota.proportions={proportions}; raise budget, or take 'quorum'."
        )


def _emulation(cluster: groups.ClusterConfig) -> Iterator[str]:
    n = cluster.num_workers
    speeds, overhead = cluster.secs_per_microbatch, cluster.overhead_secs
    if speeds and len(speeds) != n:
        yield f"cluster.secs_per_microbatch: got {len(speeds)} values, must be {n} or none."
    if isinstance(overhead, tuple) and len(overhead) != n:
        yield f"cluster.overhead_secs: got {len(overhead)} values, must be a number or {n}."
    for name in () if speeds else ("clock", "delay", "overhead_secs"):
        value = getattr(cluster, name)
        if value != getattr(groups.ClusterConfig(), name):
            yield (
                f"cluster.{name}: got {value!r}, needs emulated speeds; give "
                "cluster.secs_per_microbatch."
            )


def _rule(rule: groups.RuleConfig) -> Iterator[str]:
    takes_none = rule.name == kinds.DEFAULT_RULE or rule.name.startswith(kinds.GIVEN)
    if not (takes_none or rule.name in kinds.RULES or parts_lib.is_path(rule.name)):
        yield (
            f"rule.name: got {rule.name!r}, must be one of {', '.join(kinds.RULES)}, or "
            "'module:function' of a factory."
        )
    if takes_none and rule.arguments:
        yield f"rule.arguments: got {dict(rule.arguments)}, but {rule.name!r} takes none."


def _local(experiment: groups.ExperimentConfig) -> Iterator[str]:
    platforms, depth = experiment.cluster.platforms, experiment.dispatch_depth
    if len(platforms) == 1 or len(set(platforms)) < len(platforms):
        yield f"cluster.platforms: got {platforms}, must be () or two or more different names."
    needing = {"cluster.platforms": platforms, "dispatch_depth": depth if depth > 1 else None}
    for name, value in needing.items():
        if value and experiment.local != "stepped":
            yield f"{name}: got {value!r} with local={experiment.local!r}, needs local='stepped'."


def _slices(experiment: groups.ExperimentConfig, parts: kinds.Parts) -> Iterator[str]:
    """Why workers cannot have several devices each."""
    if not (axes := experiment.slices.axes):
        if experiment.slices.shard:
            yield f"slices.shard: got {experiment.slices.shard!r}, needs the axes of a slice."
        return
    for name, count in axes.items():
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
        if not is_count or name == "worker" or not name.isidentifier():
            yield (
                f"slices.{name}: got {count!r}, must be a number of devices, or 0 for what is "
                "left; and an axis has a name, which is not 'worker'."
            )
    if list(axes.values()).count(0) > 1:
        yield f"slices: got {axes}, must have one axis of size 0 at most."
    has = {
        "local": (experiment.local, experiment.local != "stepped"),
        "debug": (experiment.debug, experiment.debug),
        "cluster.platforms": (experiment.cluster.platforms, bool(experiment.cluster.platforms)),
        "reducer.name": (experiment.reducer.name, not parts.reducer.is_plain_sum),
        "reducer.wire": (parts.reducer.wire, parts.reducer.wire != "float32"),
        "ordering.method": (experiment.ordering.method, parts.ordering.make_observer is not None),
    }
    for name, (value, is_wrong) in has.items():
        if is_wrong:
            yield f"{name}: got {value!r}, which is refused with slices."


def _changes(cluster: groups.ClusterConfig) -> Iterator[str]:
    n = cluster.num_workers
    seen: set[tuple[int, int]] = set()
    for index, change in enumerate(cluster.changes):
        name = f"cluster.changes[{index}]"
        if change.worker >= n:
            yield f"{name}.worker: got {change.worker}, must be from 0 to {n - 1}."
        if (change.round, change.worker) in seen:
            yield f"{name}: worker {change.worker} is changed twice at round {change.round}."
        seen.add((change.round, change.worker))
        timed = change.secs_per_microbatch is not None or change.overhead_secs is not None
        if not timed and change.present is None:
            yield f"{name}: nothing changes; give secs_per_microbatch, overhead_secs or present."
        if timed and not cluster.secs_per_microbatch:
            yield f"{name}: a speed changes, but cluster.secs_per_microbatch is ()."


def _fit(experiment: groups.ExperimentConfig, parts: kinds.Parts) -> Iterator[str]:
    """Why these parts do not work with other fields."""
    data = experiment.data
    if data.sharing == "shared" and data.weighting != "shard" and not parts.reducer.gossips:
        yield f"data.weighting: got {data.weighting!r}, needs shards (data.sharing) or gossip."
    if parts.gate.closes and experiment.local == "fused":
        yield (
            f"gate.trigger: got {experiment.gate.trigger!r} with local='fused', which nothing can "
            "close early."
        )
    virtual = experiment.local == "virtual" or experiment.cluster.clock == "virtual"
    if experiment.gate.in_flight == "drop" and not virtual:
        yield "gate.in_flight: got 'drop', needs cluster.clock='virtual'."


def _budget(experiment: groups.ExperimentConfig) -> Iterator[str]:
    """What a round of every size of the cluster must hold; for private data, also of each shard."""
    cap = experiment.quota.max_microbatches or experiment.budget
    sharing = experiment.data.sharing
    for when, num_present in _presence(experiment.cluster):
        if not num_present:
            yield f"cluster.changes: no worker is present from round {when} on."
        elif num_present * cap < experiment.budget:
            yield (
                f"budget: got {experiment.budget}, but {num_present} workers of at most "
                f"quota.max_microbatches={cap} hold {num_present * cap} (round {when})."
            )
        elif sharing != "shared" and num_present > experiment.budget:
            yield (
                f"budget: got {experiment.budget}, must be at least {num_present} with "
                f"data.sharing={sharing!r}: so many workers are present from round {when} on."
            )
        else:
            continue
        return  # the first such round says it all


def _presence(cluster: groups.ClusterConfig) -> Iterator[tuple[int, int]]:
    """Yields (round, workers present from then on) for round 0 and each one with a change."""
    present = [True] * cluster.num_workers
    for when in sorted({0, *(change.round for change in cluster.changes)}):
        for change in cluster.changes:
            if change.round == when and change.present is not None:
                present[change.worker] = change.present
        yield when, sum(present)
