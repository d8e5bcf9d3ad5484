"""`--config=FILE` and `--config.field=value` for the programs in this directory. A program says

    config_flag.define()
    command_line.run(main, config_flag.parse_flags, takes_arguments=True)

and calls `config_flag.get()` in `main`. A user's mistake ends it with a message and status 2. A
program with fields of its own gives their `Schema` to `define`.

`--config` is a flag. Fields are none: `parse_flags` takes them off the command line, and reads each
text as the field's declaration says (`hetjax.parts.options`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import ml_collections
from absl import flags

from experiments import command_line
from hetjax import parts
from hetjax.config import fields, kinds
from hetjax.zoo import config, datasets

_NAME = "config"
_PREFIX = f"--{_NAME}."
_FIELD = re.compile(rf"--?(no)?{_NAME}\.([^=]*)(?:=(.*))?", re.DOTALL)


class Schema(NamedTuple):
    """Which fields a configuration has, and how it is read and checked."""

    fields: type  # a dataclass of options and groups, as of `hetjax.config.fields`
    load: Callable[[str], ml_collections.ConfigDict]
    validate: Callable[[Mapping[str, Any]], Any]
    example: str  # a file, for messages
    contradictions: Callable[[ml_collections.ConfigDict, Mapping[str, Any]], Iterable[str]]
    """What is wrong with the fields given beside the file, values by name."""

    @property
    def missing(self) -> str:
        return f"--{_NAME} is missing. Give a file first, such as --{_NAME}={self.example}."


class _Parser(flags.ArgumentParser):
    """Takes the file's path, and knows what the file holds."""

    def __init__(self, schema: Schema):
        super().__init__()
        self.schema = schema


def define(
    schema: Schema | None = None,
    *,
    flag_values: flags.FlagValues = flags.FLAGS,
    argv: Sequence[str] | None = None,
) -> None:
    """Defines `--config`, by default of `hetjax.zoo.config.ExperimentConfig`.

    `argv` begins with the program whose `--help` shows it, as `sys.argv` does, which is meant by
    None.
    """
    says = (
        "configs/NAME.py, or the config.json of a run; --config.FIELD=VALUE overrides a field "
        "of it."
    )
    flags.DEFINE(_Parser(schema or EXPERIMENT), _NAME, None, says, flag_values)
    program = (argv or sys.argv)[0]
    flag_values.register_key_flag_for_module(program, flag_values[_NAME])


def parse_flags(argv: Sequence[str], *, flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the command line; ends the program with status 2 where it is wrong.

    The `flags_parser` of `command_line.run`. Prints all flags and fields for `--help`.
    """
    schema = _schema(flag_values)
    if command_line.asks_for_help(argv):
        fields_help = command_line.fields_help(_PREFIX, schema.fields)
        command_line.print_help(argv[0], fields_help, flag_values=flag_values)
    argv = flag_values.read_flags_from_files(list(argv), force_gnu=False)
    rest, given = _taken_apart(argv, schema.fields)
    try:
        rest = flag_values(rest)
        flag = flag_values[_NAME]
        if flag.value is None and not any(re.match(r"--?only_check_args", a) for a in argv):
            raise ValueError(schema.missing)
        if flag.value is not None:
            _check_order(argv)
            flag.value = _read(schema, flag.value, given)
            flag.given = {name for name, _ in given}  # parsers are shared: absl keeps equal ones
    except flags.UnrecognizedFlagError as error:
        _end(misplaced(argv[1:], flag_values=flag_values, otherwise=str(error)), schema, argv)
    except (flags.Error, ValueError) as error:
        _end(str(error), schema, argv)
    return rest


def get(*, flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """Returns the checked configuration; ends the program with status 2 where it is wrong."""
    try:
        return _schema(flag_values).validate(flag_values[_NAME].value)
    except ValueError as error:
        _end(str(error))


def is_given(name: str, *, flag_values: flags.FlagValues = flags.FLAGS) -> bool:
    """Whether the command line has this field, beside the file."""
    return name in getattr(flag_values[_NAME], "given", ())


def misplaced(
    arguments: Sequence[str],
    *,
    flag_values: flags.FlagValues = flags.FLAGS,
    otherwise: str = f"Write {_PREFIX}FIELD=VALUE.",
) -> str:
    """What to write in place of arguments that are no flags."""
    spelt = command_line.misplaced_fields(
        arguments, _PREFIX, flag_values=flag_values, of=_schema(flag_values).fields
    )
    return "\n".join(spelt) or otherwise


def _schema(flag_values: flags.FlagValues) -> Schema:
    return flag_values[_NAME].parser.schema if _NAME in flag_values else EXPERIMENT


def _end(message: str, schema: Schema | None = None, argv: Sequence[str] = ()) -> NoReturn:
    """Says too that there is no file, where the command line lacks it."""
    if schema and message != schema.missing and _file_at(argv) is None:
        message = f"{message}\n{schema.missing}"
    print(f"The configuration cannot be used:\n{message}", file=sys.stderr)
    sys.exit(command_line.MISTAKE)


def _file_at(argv: Sequence[str]) -> int | None:
    places = (i for i, word in enumerate(argv) if re.match(rf"--?{_NAME}(=|$)", word))
    return next(places, None)


def _taken_apart(argv: Sequence[str], of: type) -> tuple[list[str], list[tuple[str, Any]]]:
    """The words that give no field, and (name, value) of each field that is given."""
    known, rest, given = dict(fields.leaves(of)), [], []
    words = iter(argv)
    for word in words:
        found = _FIELD.fullmatch(word)
        if word == "--":
            rest += [word, *words]
        elif found is None:
            rest.append(word)
        else:
            no, name, text = found.groups()
            is_flag = name in known and isinstance(known[name].default, bool)
            if text is None and is_flag:
                given.append((name, not no))
                continue
            if text is None and not no:
                text = next(words, None)
            given.append((name, None if text is None else command_line.read_field(of, name, text)))
    return rest, given


def _check_order(argv: Sequence[str]) -> None:
    early = [word for word in argv[: _file_at(argv)] if _FIELD.fullmatch(word)]
    if early:
        raise ValueError(f"Found {early[0]} in argv before a value for --{_NAME} was specified")


def _read(schema: Schema, path: str, given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The file with the fields that are given beside it."""
    loaded = schema.load(path)
    overridden = command_line.overridden(schema.fields, loaded.to_dict(), given)
    if lines := list(schema.contradictions(loaded, dict(given))):
        raise ValueError("\n".join(lines))
    return overridden


def _of_other_parts(loaded: ml_collections.ConfigDict, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with options on the command line that the chosen parts have not.

    In a file they are no mistake: it may hold what several arms of a comparison need.
    """
    yield from _of_other_data(str(given.get("data.name", loaded.data.name)), given)
    groups = fields.declared(config.ExperimentConfig)
    for group, kind in kinds.KINDS.items():
        own = fields.declared(groups[group])
        name = given.get(f"{group}.{kind.key}", loaded[group][kind.key])
        mine = [n.removeprefix(f"{group}.") for n in sorted(given) if n.startswith(f"{group}.")]
        mine = [option for option in mine if option not in own]
        known = parts.options_of(kinds.factory_of(group, name)) if mine else ()
        for option in mine:
            if option not in known:
                yield kinds.no_such_option(group, name, option, own=own)


def _of_other_data(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with options of data sets that the chosen one has not."""
    mine = datasets.options_of(name)
    others = {option for each in datasets.ARRAY_SETS for option in datasets.options_of(each)}
    for option in sorted(others.difference(mine)):
        if f"data.{option}" in given:
            yield (
                f"data.{option}: the data set {name!r} has no such option; it has "
                f"{', '.join(mine) or 'none'}."
            )


EXPERIMENT = Schema(
    config.ExperimentConfig, config.load, config.validate, "configs/digits.py", _of_other_parts
)
