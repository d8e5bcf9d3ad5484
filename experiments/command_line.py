"""The command lines of the programs here: `--help`, and fields that are given like flags.

A program that says `command_line.run(main)` prints what it is and
all that can be set for `--help`, and ends with status 0; a flag that there is not ends it with
status 2 and a message.
"""

import difflib
import itertools
import logging
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags

from experiments import option_tables
from hetjax.config import fields, kinds
from hetjax.parts import options
from hetjax.zoo import config

MISTAKE = 2
_HELP = r"--?(h|help|helpshort|helpfull)(=(true|1))?"
_WIDTH = 98


def parse_flags(argv: Sequence[str], *, fields_by: str = "") -> list[str]:
    """Parses the command line of a program.

    Args:
        argv: with the program's name.
        fields_by: what stands before a field of the configuration, such as `--set=`, if it may be
            given.
    """
    if asks_for_help(argv):
        print_help(argv[0], *([fields_help(fields_by)] if fields_by else []))
    try:
        return flags.FLAGS(list(argv))
    except flags.Error as error:
        spelt = list(misplaced_fields(argv[1:], fields_by)) if fields_by else []
        print("\n".join(spelt) or f"{error}. --help shows all flags.", file=sys.stderr)
        sys.exit(MISTAKE)


def run(
    main: Callable[..., Any],
    flags_parser: Callable[[list[str]], list[str]] = parse_flags,
    *,
    takes_arguments: bool = False,
) -> None:
    """As `absl.app.run`; the next program in the same Python, as in a notebook, has its own flags.

    Args:
        main: the program.
        flags_parser: reads the command line.
        takes_arguments: `main` gets what is left of the command line; otherwise nothing may be.
    """

    def checked(argv: list[str]) -> Any:
        if takes_arguments:
            return main(argv)
        if argv[1:]:
            sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
        return main()

    logging.getLogger("hetjax").propagate = False  # to absl's handler, which has a form of its own
    try:
        app.run(checked, flags_parser=flags_parser)
    finally:
        for module, own in dict(flags.FLAGS.flags_by_module_dict()).items():
            parent, _, name = module.rpartition(".")
            if module in sys.modules and not module.startswith("experiments."):
                continue  # of a library
            for flag in list(own):
                delattr(flags.FLAGS, flag.name)
            if sys.modules.pop(module, None):  # it defines them again when it is imported again
                delattr(sys.modules[parent], name)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether one of the flags before a `--` is `--help`."""
    ends = argv.index("--") if "--" in argv else len(argv)
    return any(re.fullmatch(_HELP, argument) for argument in argv[1:ends])


def print_help(program: str, *more: str, flag_values: flags.FlagValues = flags.FLAGS) -> NoReturn:
    """Prints what the program is, its flags and more; ends it with status 0.

    Args:
        program: the first word of its command line.
        more: is printed behind.
        flag_values: its flags.
    """
    said = (sys.modules["__main__"].__doc__ or "").strip()
    own = flag_values.get_key_flags_for_module(program)
    lines = [_line(f"--{flag.name}{_default(flag)}", flag.help) for flag in own]
    print("\n\n".join(filter(None, [said, "Flags:\n\n" + "\n".join(lines), *more])))
    sys.exit(0)


def fields_help(prefix: str, of: type = config.ExperimentConfig) -> str:
    """A line or two for each field of a configuration, which is set by `PREFIXfield=value`."""
    lines = [
        _line(f"{prefix}{name}={default}", "; ".join(filter(None, [says, allowed])))
        for name, default, says, allowed in option_tables.rows_of_fields(of)
    ]
    title = f"Fields of the configuration, {prefix}FIELD=VALUE, with their defaults:"
    return f"{title}\n\n" + "\n".join(lines)


def _default(flag: flags.Flag) -> str:
    return "" if flag.default is None else f"={flag.default_as_str[1:-1]}"  # without its quotes


def _line(name: str, says: str | None) -> str:
    indented = textwrap.fill(
        " ".join((says or "").split()), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    return f"  {name}\n{indented}" if says else f"  {name}"


def misplaced_fields(
    arguments: Sequence[str],
    prefix: str,
    *,
    flag_values: flags.FlagValues = flags.FLAGS,
    of: type = config.ExperimentConfig,
) -> Iterator[str]:
    """Yields the right spelling of each field that stands alone: `--epochs=3`, or `epochs=3`.

    Args:
        arguments: of the command line.
        prefix: what stands before a field, such as `--config.`.
        flag_values: the program's own flags, which are none.
        of: the dataclass of the configuration.

    Example:
        >>> list(misplaced_fields(["--epochs=3"], "--config.", flag_values=flags.FlagValues()))
        ['--epochs=3: epochs is a field of the configuration; write --config.epochs=3.']
    """
    for index, argument in enumerate(arguments):
        if argument == "--":
            return
        found = re.fullmatch(r"(-{0,2})([A-Za-z_][\w.]*)(=.*)?", argument, re.DOTALL)
        if not found or not (found[1] or found[3]):
            continue
        name, value = found[2], found[3] or ""
        following = arguments[index + 1 : index + 2]
        if not value and following and not following[0].startswith("-"):
            value = f"={following[0]}"
        if found[1] and (name in flag_values or name.partition(".")[0] in flag_values):
            continue
        near, known = _fields_like(name.removeprefix("config."), of)
        if not near:
            continue
        spelt = " or ".join(f"{prefix}{field}{value}" for field in near)
        if known and len(near) == 1:
            yield f"{argument}: {near[0]} is a field of the configuration; write {spelt}."
        elif known:
            yield f"{argument}: several fields have this name; write {spelt}."
        elif not _is_like_a_flag(name, flag_values):
            yield f"{argument}: there is no such flag or field. Did you mean {spelt}?"


def _fields_like(name: str, of: type) -> tuple[list[str], bool]:
    """The fields of this name, with or without their groups, else the nearest; whether they are."""
    leaves = fields.leaf_names(of)
    if name in leaves:
        return [name], True
    exact = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    if exact:
        return exact, True
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in reversed(leaves)}
    by_name |= {leaf: leaf for leaf in leaves}
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)
    return [by_name[each] for each in close], False


def _is_like_a_flag(name: str, flag_values: flags.FlagValues) -> bool:
    return bool(difflib.get_close_matches(name, list(flag_values), n=1, cutoff=0.7))


def read_field(parent: type, name: str, text: str) -> Any:
    """What a text of the command line means, as the declaration of the field says."""
    option = dict(fields.leaves(parent)).get(name)
    return options.literal(text) if option is None else option.rule.read(text)


def given_fields(texts: Iterable[str], *, behind: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of a field, of each `NAME=TEXT`.

    Raises:
        ValueError: one is none; `behind` is the file that it stands behind.
    """
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r}, behind {behind}: must be FIELD=VALUE.")
        yield name, read_field(config.ExperimentConfig, name, value)


def cells(grid: Iterable[str]) -> list[tuple[str, ...]]:
    """The product of axes `FIELD=VALUE,VALUE`; a comma in brackets parts no values.

    Example:
        >>> cells(["a=1,2", "b=(3,4)"])
        [('a=1', 'b=(3,4)'), ('a=2', 'b=(3,4)')]
    """
    axes = []
    for axis in grid:
        name, _, text = axis.partition("=")
        values = re.findall(r"(?:\([^()]*\)|\[[^][]*\]|\{[^{}]*\}|[^,])+", text)
        if not values:
            raise ValueError(f"--grid: got {axis!r}, must be FIELD=VALUE,VALUE.")
        axes.append([f"{name}={value.strip()}" for value in values])
    return list(itertools.product(*axes))


def overridden(
    parent: type, config: Mapping[str, Any], given: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """A configuration with other values of some fields.

    Args:
        parent: its dataclass.
        config: nested values.
        given: dotted names, and values; `arguments` are all options of a part.

    Raises:
        ValueError: a field is unknown, or a value is not allowed; a line for each.
    """
    errors: list[str] = []
    found = dict(config)
    for name, value in given:
        group, _, last = name.rpartition(".")
        if last == kinds.ARGUMENTS and group in kinds.KINDS.keys() & found.keys():
            own = fields.declared(fields.declared(parent)[group])
            kept = found[group].keys() & own.keys() - {last}
            found[group] = {field: found[group][field] for field in kept}
        for part in reversed(name.split(".")):
            value = {part: value}
        fields.parse_group(parent, value, "", errors)
        found = _merged(found, value)
    if errors:
        raise ValueError("\n".join(errors))
    return found


def _merged(config: Any, over: Any) -> Any:
    if not isinstance(config, Mapping) or not isinstance(over, Mapping):
        return over
    return {**config, **{name: _merged(config.get(name), value) for name, value in over.items()}}
