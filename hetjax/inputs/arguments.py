"""What `fit` is given: checks of it, and fields that become a configuration."""

import dataclasses
import importlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import parts as parts_lib
from hetjax import slices
from hetjax.cluster import emulate
from hetjax.comm import runtime
from hetjax.config import checks, groups, kinds
from hetjax.config import experiment as config_lib
from hetjax.inputs import refusals as inputs
from hetjax.local import rules as rules_lib

logger = logging.getLogger(__name__)

# Fields of `hetjax.zoo.config` that stand for what `fit` is given as arguments.
_OF_THE_CALLER = ("model", "optimizer")
_OF_THE_CALLER_DATA = ("name", "dir", "num_train")


class Given(NamedTuple):
    """What `fit` or `Run` was given, checked."""

    config: config_lib.ExperimentConfig
    parts: kinds.Parts
    rule: rules_lib.LocalRule | None  # None: gradients are added up
    recorded: dict[str, Any]  # of the configuration


def configuration(
    config: config_lib.ExperimentConfig | None,
    fields: dict[str, Any],
    *,
    workers: int | None,
    rule: rules_lib.LocalRule | None = None,
    more: Mapping[str, rules_lib.LocalRule] | None = None,
    shard: Any = None,
) -> Given:
    """The checked configuration, the parts, the local rule, and what of it is recorded.

    Args:
        config: checked already; or None.
        fields: or its fields.
        workers: their number, in place of `cluster.num_workers`; None: not given.
        rule: what a worker does with its microbatches; None: what the configuration names.
        more: of further kinds of rounds, by name; None: there are none.
        shard: how arrays lie on a slice; None: as the configuration says.

    Raises:
        ValueError: both are given, or a field is wrong, or the rule is not the configuration's.
    """
    if config is not None and (fields or workers is not None):
        given = sorted([*fields, *(["workers"] if workers is not None else [])])
        raise ValueError(f"give either config or fields, not both: {given}")
    if config is None:
        config, chosen = config_of_fields(fields, workers=workers)
    else:
        chosen = kinds.of_config(config, {})
    if seats := runtime.current().seats:
        cluster = dataclasses.replace(config.cluster, num_workers=seats)
        config = dataclasses.replace(config, cluster=cluster)
    config, rule = _with_rule(config, rule)
    if shard is not None:
        if not config.slices.axes:
            raise ValueError("shard: given without slices; give slices={'data': 2}, say")
        named = dataclasses.replace(config.slices, shard=slices.described(shard))
        config = dataclasses.replace(config, slices=named)
    recorded = config_lib.to_dict(config)
    if more:
        made = {name: each for name, each in more.items() if isinstance(each, rules_lib.LocalRule)}
        recorded["rules"] = {name: described_rule(each) for name, each in made.items()}
    return Given(config, chosen, rule, recorded)


def described_rule(rule: rules_lib.LocalRule) -> dict[str, Any]:
    """The fields of a configuration that make a local rule again.

    Of a rule that cannot be written down the name is `given: ` and where it is from.
    """
    rules_lib.check(rule)
    return kinds.written(rule, "name", kinds.RULES)


def _with_rule(
    config: config_lib.ExperimentConfig, rule: rules_lib.LocalRule | None
) -> tuple[config_lib.ExperimentConfig, rules_lib.LocalRule | None]:
    """The configuration with the rule and all its options in it, and the rule that it names."""
    made = _rule_of(config.rule) if rule is None else rule
    if made is None:
        return config, None
    named = config_lib.parse(groups.RuleConfig, described_rule(made))
    if rule is not None and config.rule not in (groups.RuleConfig(), named):
        raise ValueError(
            f"rule: the configuration names {_called(config.rule)} and rule= is {_called(named)}"
        )
    return dataclasses.replace(config, rule=named), made


def _called(rule: groups.RuleConfig) -> str:
    return f"{rule.name!r}{f' of {dict(rule.arguments)}' if rule.arguments else ''}"


def _rule_of(fields: groups.RuleConfig) -> rules_lib.LocalRule | None:
    """The local rule that a configuration names; None: gradients are added up."""
    if fields.name == kinds.DEFAULT_RULE:
        return None
    path = kinds.RULES.get(fields.name, fields.name)
    factory = kinds.imported("rule.name", path, "local rule", "as rule=…")
    rule = parts_lib.make(factory, dict(fields.arguments), "rule.")
    rules_lib.check(rule)
    return rule


def config_of_fields(
    fields: dict[str, Any], *, workers: int | None = None
) -> tuple[config_lib.ExperimentConfig, kinds.Parts]:
    """Fields over the defaults, with a worker for each device, or `virtual` where they lack.

    Args:
        fields: of the configuration. `quota`, `ordering`, `reducer` and `gate` are each a part, a
            name, or a dict of fields, whose first may be a part; `cluster` an `EmulatedCluster`
            or a dict.
        workers: their number, in place of `cluster.num_workers`.

    Returns:
        the configuration, and the parts.

    Raises:
        ValueError: a field is wrong, or is none that `fit` uses.
    """
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()}
    inputs.check_fields(fields)
    data = fields.get("data")
    given = [name for name in _OF_THE_CALLER if name in fields] + [
        f"data.{name}" for name in _OF_THE_CALLER_DATA if isinstance(data, dict) and name in data
    ]
    if given:
        raise ValueError(
            f"fit: {', '.join(given)}: fields of the command line; give loss_fn, optimizer and "
            "source"
        )
    objects, lines = {}, []
    for group in kinds.KINDS:
        if group in fields:
            try:
                fields[group], objects[group] = _of_group(group, fields[group])
            except ValueError as error:
                lines.append(str(error))
    if lines:
        raise ValueError("\n".join(lines))
    of_each = slices.num_devices(fields.get("slices"))
    fields["cluster"] = cluster_fields(fields.get("cluster", {}), workers=workers, of_each=of_each)
    config = config_lib.parse(config_lib.ExperimentConfig, fields)
    config, chosen = checks.resolve(config, objects)
    return (config if "local" in fields else on_devices(config)), chosen


def on_devices(config: Any, *, is_asked_for: bool = False) -> Any:
    """The same configuration, `virtual` where one process has fewer devices than workers: says so.

    It also says where CPU devices are left out because JAX has an accelerator.

    Args:
        config: a dataclass with `local` and `cluster`, as an `ExperimentConfig` has them.
        is_asked_for: whether the user set `local`, which then stays: too few devices are refused.
    """
    num_workers, devices = config.cluster.num_workers, jax.devices()
    is_one = jax.process_count() == 1 and not runtime.current().seats
    is_one = is_one and not getattr(config, "slices", groups.SlicesConfig()).axes
    if config.local != "stepped" or config.cluster.platforms or not is_one:
        return config
    platform, on_cpus = devices[0].platform, jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if num_workers > len(devices):
        if is_asked_for:
            return config
        logger.info(
            f"{num_workers} workers on {len(devices)} {platform} device(s): local='virtual' plays "
            "them one after the other, and their clocks are virtual. For a CPU device each, call "
            f"hetjax.use_cpu_workers({num_workers}) before JAX is first used (where JAX finds a "
            "GPU, set JAX_PLATFORMS=cpu, too); on GPUs take no more workers than there are."
        )
        fields = {"local": "virtual", "dispatch_depth": 0}  # `virtual` has no other depth
        has = {name: value for name, value in fields.items() if hasattr(config, name)}
        return dataclasses.replace(config, **has)
    if platform != "cpu" and num_workers < on_cpus:
        logger.warning(
            f"JAX computes on {platform}, so there are {num_workers} worker(s), and the {on_cpus} "
            "CPU devices are left out. With JAX_PLATFORMS=cpu they are the workers; with "
            f"cluster={{'num_workers': {on_cpus}}} so many are played on the {platform}."
        )
    return config


def _of_group(group: str, given: Any) -> tuple[dict[str, Any], Any]:
    """`(fields of the group, the part)` of a part, a name, or a dict of fields."""
    key, default = kinds.KINDS[group].key, getattr(config_lib.ExperimentConfig(), group)
    rest = dict(given) if isinstance(given, dict) else {key: given}
    own = {field.name for field in dataclasses.fields(default)} - {key, kinds.ARGUMENTS}
    of_run = {name: rest.pop(name) for name in own & rest.keys()}
    name = f"{group}.{kinds.ARGUMENTS}"
    more = config_lib.fields.ARGUMENTS.check(name, rest.pop(kinds.ARGUMENTS, ()))
    named = {key: getattr(default, key), **rest, kinds.ARGUMENTS: more}
    part = kinds.resolve(group, named, own=own)
    return of_run | kinds.described(group, part), part


def cluster_fields(given: Any, *, workers: int | None, of_each: int = 1) -> Any:
    """The fields of a cluster, with its number of workers; what is none as it is.

    Args:
        given: an `EmulatedCluster`, or a dict of fields.
        workers: their number; None: one for each speed, or for the devices that one has.
        of_each: devices of a worker.

    Raises:
        ValueError: it is of a class of the user's, whose functions a run would not call.
    """
    if isinstance(given, emulate.EmulatedCluster):
        if type(given) is not emulate.EmulatedCluster:
            raise ValueError(
                f"cluster: got a {type(given).__name__}, whose functions a run would not call; "
                "give a hetjax.cluster.emulate.EmulatedCluster itself"
            )
        given = dataclasses.asdict(given) | {"num_workers": given.num_workers}
    if not isinstance(given, dict):
        return given
    speeds = given.get("secs_per_microbatch", ())
    num_speeds = np.size(speeds) if np.ndim(speeds) else 0
    fields = dict(given) if workers is None else {**given, "num_workers": workers}
    if "num_workers" not in fields:
        platforms = given.get("platforms", ())
        several = platforms if isinstance(platforms, list | tuple) else ()  # the check tells
        count = num_speeds or runtime.current().seats
        fields["num_workers"] = count or max(mesh_lib.num_devices(several) // of_each, 1)
    return fields


def versions() -> dict[str, str]:
    """Of what computes a run."""
    return {name: importlib.import_module(name).__version__ for name in ("hetjax", "jax")}
