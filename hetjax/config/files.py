"""JSON files as nested mappings, their mistakes as sentences."""

import json
import pathlib
from typing import Any

from hetjax.parts import options


def read_json(path: str | pathlib.Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      ValueError: the file cannot be read or is not JSON; says where.
    """
    text = read_text(pathlib.Path(path).expanduser())
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path}: not valid JSON at {where}: {error.msg}.") from None


def read_text(path: pathlib.Path) -> str:
    """Returns what a file in UTF-8 holds.

    Raises:
      ValueError: it cannot be read; names the nearest file that there is.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        near = [each.name for each in path.parent.glob(f"*{path.suffix}")]
        hint = options.nearest(path.name, near)
        raise ValueError(f"{path}: cannot be read: {error.strerror}.{hint}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8.") from None
