"""`--config=FILE` and `--config.field=value` for the programs in this directory.

`config_flags` of ml_collections reads `.py` files only, and lets a misspelt field out as a
traceback. So its flag gets a parser of ours, which reads `.json` too and checks each override
against its field's rule first. A program says

    config_flag.define()
    app.run(main, flags_parser=config_flag.parse_flags)

and calls `config_flag.get()` in `main`. A user's mistake ends it with a message and status 2. A
program with fields of its own gives their `Schema` to `define`.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import ml_collections
from absl import flags
from ml_collections import config_flags

from experiments import command_line
from hetjax import kinds, parts
from hetjax.config import fields
from hetjax.zoo import config, datasets

_NAME = "config"
_PREFIX = f"--{_NAME}."
_BOOLEANS = ("true", "t", "1", "false", "f", "0")  # as absl takes them

Overrides = Sequence[tuple[str, str | None, str | None]]


class Schema(NamedTuple):
    """Which fields a configuration has, and how it is read and checked."""

    fields: type  # a dataclass, its fields made by `hetjax.config.fields`
    load: Callable[[str], ml_collections.ConfigDict]
    validate: Callable[[ml_collections.ConfigDict], Any]
    example: str  # a file, for messages
    contradictions: Callable[[ml_collections.ConfigDict, Overrides], Iterable[str]]
    """What is wrong with overrides beside the file; they are `(field, text, next argument)`."""

    @property
    def missing(self) -> str:
        return f"--{_NAME} is missing. Give a file first, such as --{_NAME}={self.example}."


def define(
    schema: Schema | None = None,
    *,
    flag_values: flags.FlagValues = flags.FLAGS,
    argv: Sequence[str] | None = None,
) -> flags.FlagHolder[ml_collections.ConfigDict]:
    """Defines `--config`, by default of `hetjax.zoo.config.ExperimentConfig`.

    `argv` is where its overrides are looked for, `sys.argv` if None.
    """
    schema = EXPERIMENT if schema is None else schema
    holder = config_flags.DEFINE_config_file(
        _NAME,
        default=None,
        help_string="configs/NAME.py, or the config.json of a run; --config.FIELD=VALUE "
        "overrides a field of it.",
        flag_values=flag_values,
        sys_argv=None if argv is None else list(argv),
    )
    flag_values[_NAME].parser = _FileParser(argv, schema)
    program = sys.argv[0]  # whose flags --help shows
    flag_values.register_key_flag_for_module(program, flag_values[_NAME])
    return holder


def parse_flags(argv: Sequence[str], *, flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the command line; ends the program with status 2 where it is wrong.

    The `flags_parser` of `absl.app.run`. Prints all flags and fields for `--help`.
    """
    if command_line.asks_for_help(argv):
        fields_help = command_line.fields_help(_PREFIX, _schema(flag_values).fields)
        command_line.print_help(fields_help, flag_values=flag_values)
    try:
        rest = flag_values(list(argv))
    except flags.UnrecognizedFlagError as error:
        spelt = misplaced(argv[1:], flag_values=flag_values, otherwise=str(error))
        _end(_with_missing(spelt, argv, flag_values))
    except flags.Error as error:
        # 'flag --config=…: ' is absl's; what follows is our own message.
        _end(_with_missing(re.sub(rf"^flag --{_NAME}=\S*: ", "", str(error)), argv, flag_values))
    if flag_values[_NAME].value is None and not _only_checks(argv):
        _end(_schema(flag_values).missing)
    return rest


def _schema(flag_values: flags.FlagValues) -> Schema:
    return flag_values[_NAME].parser.schema if _NAME in flag_values else EXPERIMENT


def _with_missing(message: str, argv: Sequence[str], flag_values: flags.FlagValues) -> str:
    is_given = any(re.match(rf"--?{_NAME}(=|$)", argument) for argument in argv)
    return message if is_given else f"{message}\n{_schema(flag_values).missing}"


def misplaced(
    arguments: Sequence[str],
    *,
    flag_values: flags.FlagValues = flags.FLAGS,
    otherwise: str = f"Write {_PREFIX}FIELD=VALUE.",
) -> str:
    """What to write in place of arguments that are no flags."""
    schema = _schema(flag_values)
    spelt = command_line.misplaced_fields(
        arguments, _PREFIX, flag_values=flag_values, of=schema.fields
    )
    return "\n".join(spelt) or otherwise


def get(*, flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """Returns the checked configuration; ends the program with status 2 where it is wrong."""
    try:
        return _schema(flag_values).validate(flag_values[_NAME].value)
    except ValueError as error:
        _end(str(error))


def _end(message: str) -> NoReturn:
    print(f"The configuration cannot be used:\n{message}", file=sys.stderr)
    sys.exit(command_line.MISTAKE)


def _only_checks(argv: Sequence[str]) -> bool:
    return any(re.match(r"--?only_check_args", argument) for argument in argv)


class _FileParser(flags.ArgumentParser):
    """Reads the file, and refuses overrides that its fields do not take."""

    def __init__(self, argv: Sequence[str] | None, schema: Schema):
        self._argv, self.schema = argv, schema

    def parse(self, path: str) -> ml_collections.ConfigDict:
        loaded = self.schema.load(path)
        argv = sys.argv if self._argv is None else self._argv
        overrides = list(_overrides(argv))
        errors = [line for override in overrides for line in _check(self.schema.fields, *override)]
        errors = errors or list(self.schema.contradictions(loaded, overrides))
        if errors:
            raise ValueError("\n".join(errors))
        return loaded.lock()

    def flag_type(self) -> str:
        return "configuration file"


def _overrides(argv: Sequence[str]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yields (field, text, None) of each `--config.field=text`, (field, None, the next
    argument) of each `--config.field`."""
    for index, argument in enumerate(argv):
        if argument == "--":
            return
        if found := re.fullmatch(rf"--?(?:no)?{_NAME}\.([^=]*)(?:=(.*))?", argument, re.DOTALL):
            name, text = found.groups()
            following = argv[index + 1] if text is None and index + 1 < len(argv) else None
            yield name, text, following


def _check(of: type, name: str, text: str | None, following: str | None) -> list[str]:
    """Returns what is wrong with an override, in the words of `hetjax.config`."""
    parts = name.split(".")
    default: Any = of()
    for part in parts:
        default = getattr(default, part, None)
    if isinstance(default, bool) and (text is None or text.lower() in _BOOLEANS):
        return []
    value: Any = following if text is None else text
    if value is not None and not isinstance(default, str):
        with contextlib.suppress(SyntaxError, ValueError):
            value = ast.literal_eval(value)
    given: Any = value
    for part in reversed(parts):
        given = {part: given}
    errors: list[str] = []
    fields.parse_group(of, given, "", errors)
    return errors


def _of_other_parts(loaded: ml_collections.ConfigDict, overrides: Overrides) -> Iterator[str]:
    """Yields what is wrong with options on the command line that the chosen parts have not.

    In a file they are no mistake: it may hold what several arms of a comparison need.
    """
    given = {name: following if text is None else text for name, text, following in overrides}
    yield from _of_other_data(str(given.get("data.name", loaded.data.name)), given)
    for group, kind in kinds.KINDS.items():
        key = f"{group}.{kind.key}"
        name = given.get(key, loaded[group][kind.key])
        options = {field for field in given if field.startswith(f"{group}.")}
        union = kinds.options_of(group)
        if name not in kind.registry:
            continue
        mine = parts.options_of(kind.registry[name])
        for field in sorted(options):
            option = field.removeprefix(f"{group}.")
            if option in union and option not in mine:
                yield kinds.no_such_option(group, name, option)


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
