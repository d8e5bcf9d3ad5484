"""Which fields has a configuration, and which options has each part? Writes both pages of docs/.

python -m experiments.option_tables
"""

import inspect
import pathlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hetjax import parts
from hetjax.config import fields, kinds
from hetjax.zoo import config


def rows_of_fields(parent: type) -> Iterator[tuple[str, str, str, str]]:
    """(dotted name, default, what it is, what is allowed) of all the fields below `parent`."""
    names = {f"{group}.{kind.key}": list(kind.registry) for group, kind in kinds.KINDS.items()}
    names["rule.name"] = list(kinds.RULES)
    for dotted, option in fields.leaves(parent):
        allowed = option.rule.allowed
        if dotted in names:
            allowed = f"one of {', '.join(names[dotted])}, or the import path of a factory"
        yield dotted, repr(option.default), option.told, allowed


def fields_page() -> str:
    """The table of all fields, in Markdown, without options of parts."""
    lines = [
        "# The fields of a configuration",
        "",
        "Made by `python -m experiments.option_tables`. The options of parts are in",
        "[parts.md](parts.md); how a field is set is in [configuration.md](configuration.md).",
        "",
        "| field | default | allowed | what it is |",
        "|---|---|---|---|",
    ]
    of_parts = {name for name, *_ in rows_of_options()}
    lines += [
        f"| `{name}` | `{default}` | {_cell(allowed)} | {_cell(told)} |"
        for name, default, told, allowed in rows_of_fields(config.ExperimentConfig)
        if name not in of_parts and not name.endswith(f".{kinds.ARGUMENTS}")
    ]
    return "\n".join(lines) + "\n"


def rows_of_options() -> Iterator[tuple[str, str, str, str, str]]:
    """(field, parts that have it, default, what is allowed, unit and sentence) of each option."""
    for group in kinds.KINDS:
        for name, owners, option in kinds.stated(group):
            yield f"{group}.{name}", owners, _default(option), option.rule.allowed, option.told


def parts_page() -> str:
    """The table of all parts and their options, in Markdown."""
    lines = [
        "# The parts and their options",
        "",
        "Made by `python -m experiments.option_tables`. A part is given to `hetjax.fit` as an",
        "object, a name or a dict of fields; `--config.quota.min_gain=0.05` sets one in a command.",
        "[contracts.md](contracts.md) says what a part's functions are given and must return.",
    ]
    for group, kind in kinds.KINDS.items():
        rows = [row for row in rows_of_options() if row[0].startswith(f"{group}.")]
        lines += _section(f"{group}.{kind.key}", kind.example, kind.title, kind.registry, rows)
    rules = {name: pkgutil.resolve_name(path) for name, path in kinds.RULES.items()}
    rows = [
        (f"rule.{option}", name, _default(each), each.rule.allowed, each.told)
        for name, factory in rules.items()
        if parts.is_factory(factory)
        for option, each in parts.options_of(factory).items()
    ]
    lines += _section("rule.name", "rule=hetjax.per_example_clip(1.0)", "local rule", rules, rows)
    return "\n".join(lines) + "\n"


def _section(
    field: str,
    example: str,
    title: str,
    registry: Mapping[str, Callable[..., Any]],
    rows: Iterable[tuple[str, ...]],
) -> Iterator[str]:
    """Of the parts of a kind and of their options."""
    yield from ("", f"## `{field}`", "", f"For example `{example}`.", "")
    yield from (f"| {title} | what it is |", "|---|---|")
    for name, factory in registry.items():
        first = (inspect.getdoc(factory) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"| `{name}` | {_cell(first)} |"
    yield from ("", "| option | of | default | allowed | what it is |", "|---|---|---|---|---|")
    for option, owners, shown, allowed, says in rows:
        yield f"| `{option}` | {owners} | `{shown}` | {_cell(allowed)} | {_cell(says)} |"


def _default(option: parts.Option) -> str:
    return "no default" if option.is_required else repr(option.default)


def _cell(text: str) -> str:
    """A text in a table of Markdown."""
    return text.replace("|", "\\|")


def pages() -> dict[pathlib.Path, str]:
    """What each page holds."""
    docs = pathlib.Path(__file__).parent.parent / "docs"
    return {docs / "parts.md": parts_page(), docs / "fields.md": fields_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
