"""Which kinds of parts does a run take, and how is a part made from what a user gives?

A user gives an object, a name, or a dict of fields: `resolve` makes the part of each. The
registries map the names of the command line to factories; only this module looks into them.
A configuration holds the options of the part that it names, and that part's factory checks them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hetjax import gates, messages, ordering, parts, quota, topology
from hetjax.parts import options as options_lib

GIVEN = "given: "  # stands in a configuration before what cannot be written down
ARGUMENTS = "arguments"  # the field of a group that holds the options of its part
DEFAULT_RULE = "gradient_sums"  # the local rule that a run has where it is given none
RULES = {  # local rules by name: where their factories are
    DEFAULT_RULE: "hetjax.local.gradients:gradient_sums",
    "local_steps": "hetjax.local.local_steps:local_steps",
    "per_example_clip": "hetjax.local.clipping:per_example_clip",
}


class PartKind(NamedTuple):
    """A kind of part."""

    title: str
    group: str  # of fields in the configuration; the argument of `fit`
    key: str  # the field of that group that names the part
    record: type
    registry: Mapping[str, Callable[..., Any]]
    functions: Mapping[str, int]  # that the record must have, and with how many arguments
    example: str


_KINDS = (
    PartKind(
        "quota policy",
        "quota",
        "policy",
        quota.QuotaPolicy,
        quota.POLICIES,
        {"init": 2, "assign": 3, "observe": 2},
        "quota=hetjax.quota.adaptive(min_gain=0.05)",
    ),
    PartKind(
        "ordering",
        "ordering",
        "method",
        ordering.Ordering,
        ordering.ORDERINGS,
        {"init": 2, "place": 3},
        "ordering=hetjax.ordering.d_grab(block_pairs=4)",
    ),
    PartKind(
        "reducer",
        "reducer",
        "name",
        topology.Reducer,
        topology.REDUCERS,
        {"make": 1},
        'reducer=hetjax.topology.matcha(graph="ring", budget=0.5)',
    ),
    PartKind(
        "gate",
        "gate",
        "trigger",
        gates.Gate,
        gates.GATES,
        {"open": 2, "closes_at": 2},
        "gate=hetjax.gates.quorum(12)",
    ),
)
KINDS: dict[str, PartKind] = {kind.group: kind for kind in _KINDS}


class Parts(NamedTuple):
    """A part of each kind."""

    quota: quota.QuotaPolicy
    ordering: ordering.Ordering
    reducer: topology.Reducer
    gate: gates.Gate


def resolve(group: str, given: Any, *, own: Iterable[str] = ()) -> Any:
    """Makes a part from what a user gives.

    Args:
        group: the kind, a key of `KINDS`.
        given: a part; a registered name, or the import path `module:function` of a factory; or a
            dict with a part or a name and the options of its factory, such as
            `{"policy": "adaptive", "min_gain": 0.05}`.
        own: fields of the group that are no options, for messages.

    Returns:
        the part.

    Raises:
        ValueError: it is none of these, the name is not known, or the part has no such option. A
            line for each mistake.

    Example:
        >>> resolve("gate", {"trigger": "quorum", "quorum": 12}) == resolve("gate", "quorum")
        False
    """
    kind = KINDS[group]
    options = dict(given) if isinstance(given, Mapping) else {kind.key: given}
    if kind.key not in options:
        raise ValueError(f"{group}: got {dict(given)!r}, which has no {kind.key!r}")
    name = options.pop(kind.key)
    options |= dict(options.pop(ARGUMENTS, {}))  # where names of fields are names of options, too
    if isinstance(name, str):
        unknown = functools.partial(no_such_option, group, name, own=own)
        made = parts.make(factory_of(group, name), options, f"{group}.", unknown)
        return _checked(kind, made, name)
    if options and isinstance(name, kind.record):
        raise ValueError(f"{group}: {', '.join(options)}: the {kind.title} is made already")
    return _checked(kind, name)


def no_such_option(group: str, name: str, option: str, *, own: Iterable[str] = ()) -> str:
    """The message about an option that a part has not: whose it is, or the nearest that it has."""
    mine = [f"{group}.{each}" for each in parts.options_of(factory_of(group, name))]
    near = [*mine, *(f"{group}.{field}" for field in own)]
    hint = options_lib.nearest_field(f"{group}.{option}", near)
    registry = KINDS[group].registry
    owners = [repr(each) for each, make in registry.items() if option in parts.options_of(make)]
    if owners:
        hint += f" It is one of {', '.join(owners)}."
    elif not hint:
        hint = f" It has: {', '.join(mine) or 'none'}."
    return f"{group}.{option}: {KINDS[group].key}={name!r} has no such option.{hint}"


def in_force(group: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a part: those of a file, without what only other parts have, and defaults."""
    known: Mapping[str, parts.Option] = {}
    with contextlib.suppress(ValueError):  # making the part tells that there is none
        known = parts.options_of(factory_of(group, name))
    others = {option for option, *_ in stated(group)}.difference(known)
    defaults = {n: option.default for n, option in known.items() if not option.is_required}
    return defaults | {n: value for n, value in given.items() if n not in others}


def factory_of(group: str, name: str) -> Callable[..., Any]:
    """The factory of a registered name, or of an import path.

    Raises:
        ValueError: there is none.
    """
    kind = KINDS[group]
    dotted = f"{group}.{kind.key}"
    if name in kind.registry:
        return kind.registry[name]
    if name.startswith(GIVEN) or parts.is_path(name):
        return imported(dotted, name, kind.title, f"such as {kind.example}")
    raise ValueError(
        f"{dotted}: got {name!r}, must be one of {', '.join(kind.registry)}, or 'module:function' "
        f"of a factory.{options_lib.nearest(name, list(kind.registry))}"
    )


def imported(field: str, name: str, title: str, example: str) -> Callable[..., Any]:
    """The factory at an import path.

    Args:
        field: that has the path, for messages.
        name: the path, or what `described` says of a part that cannot be written down.
        title: what the factory makes.
        example: how the object is given again.

    Raises:
        ValueError: there is none.
    """
    if name.startswith(GIVEN):
        raise ValueError(
            f"{field}: got {name!r}, a {title} that could not be written down. Give the object "
            f"again, {example}; or make it by a @hetjax.parts.factory of a module"
        )
    with messages.as_mistake(f"{field}: ", after="."):
        return parts.load(name)


def _checked(kind: PartKind, given: Any, name: str = "") -> Any:
    """Refuses an object that is no part of this kind; `name` is of the factory that made it."""
    if parts.is_factory(given):
        wrong = ", which is a factory: call it, with its options"
    elif not isinstance(given, kind.record):
        missing = [name for name in kind.functions if not hasattr(given, name)]
        wrong = f", which has no {', '.join(missing)}" if missing else ", another class"
    elif of_function := parts.wrong_functions(given, kind.functions):
        wrong = f", whose {of_function}"
    else:
        return given
    got = f"{kind.group}.{kind.key}: {name!r} makes" if name else f"{kind.group}: got"
    raise ValueError(
        f"{got} {parts.shown(given)}{wrong}. Give {kind.example}, or one of "
        f"{', '.join(kind.registry)}"
    )


def described(group: str, part: Any) -> dict[str, Any]:
    """The fields of a configuration that make a part again: its name, or import path, and options.

    Of a part that cannot be written down the name is `given: ` and where it is from.
    """
    kind = KINDS[group]
    paths = {name: parts.path_of(factory) for name, factory in kind.registry.items()}
    return written(part, kind.key, paths)


def written(part: Any, key: str, paths: Mapping[str, str]) -> dict[str, Any]:
    """As `described`, of any part: `key` has its name, `paths` those of factories with names."""
    made = parts.made_by(part)
    if made is None:
        return {key: f"{GIVEN}{parts.label(part)}", ARGUMENTS: {}}
    names = (name for name, path in paths.items() if path == made.path)
    return {key: next(names, made.path), ARGUMENTS: dict(made.arguments)}


def name_of(group: str, part: Any) -> str:
    """What messages call a part: its name, or where it is from."""
    return described(group, part)[KINDS[group].key]


def stated(group: str) -> list[tuple[str, str, parts.Option]]:
    """(name, parts that have it, option) of all registered parts of a kind.

    Parts that state the same of an option share a row.
    """
    found: dict[tuple[str, ...], tuple[parts.Option, list[str]]] = {}
    for owner, factory in KINDS[group].registry.items():
        for name, option in parts.options_of(factory).items():
            row = name, option.rule.allowed, option.told, repr(option.default)
            found.setdefault(row, (option, []))[1].append(owner)
    return [(row[0], ", ".join(owners), option) for row, (option, owners) in found.items()]


def of_config(config: Any, given: Mapping[str, Any]) -> Parts:
    """The parts that a configuration names.

    Args:
        config: an `ExperimentConfig`; an option of a part that is not chosen is not looked at.
        given: the parts that were given as objects, by group: of these the configuration has
            only notes.

    Raises:
        ValueError: a name or an option is wrong; a line for each.
    """
    made, lines = {}, []
    for group in KINDS:
        try:
            made[group] = given[group] if group in given else _of_group(group, config)
        except ValueError as error:
            lines.append(str(error))
    if lines:
        raise ValueError("\n".join(lines))
    return Parts(**made)


def _of_group(group: str, config: Any) -> Any:
    fields, key = getattr(config, group), KINDS[group].key
    name = getattr(fields, key)
    options = in_force(group, name, dict(fields.arguments))
    own = [field.name for field in dataclasses.fields(fields)]
    return resolve(group, {key: name, ARGUMENTS: options}, own=own)


def of_two(order: ordering.Ordering, reducer: topology.Reducer) -> Iterator[str]:
    """Why this ordering and this reducer do not work with each other."""
    if order.coordinated and not reducer.keeps_replicas_equal:
        equal = [name for name, make in topology.REDUCERS.items() if make().keeps_replicas_equal]
        yield (
            f"ordering.method: {name_of('ordering', order)!r} does not work with reducer.name="
            f"{name_of('reducer', reducer)!r}; take {', '.join(equal)}, or 'pair_balance'."
        )
