"""Configuration files as nested mappings: Python with a `get_config()`, or JSON without code.

Whatever is wrong with a file becomes one `ValueError` that names the file and the line. A traceback
through the flags library names neither.
"""

from __future__ import annotations

import pathlib
import runpy
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from hetjax.config import files


def read(path: str | pathlib.Path) -> Any:
    """Returns what a `.json` or `.py` configuration holds, as plain values, unchecked.

    Raises:
      ValueError: the file is missing, has another suffix, or cannot be run or parsed.
    """
    suffix = pathlib.Path(path).suffix
    if suffix == ".json":
        return files.read_json(path)
    if suffix == ".py":
        return run_get_config(path)
    raise ValueError(f"'{path}': a configuration is a .py file with get_config(), or a .json file.")


def run_get_config(path: str | pathlib.Path) -> Any:
    """Runs a Python file and returns what its `get_config()` returns, as plain values.

    Raises:
      ValueError: the file cannot be read, fails, or has no `get_config()` that returns a
        configuration.
    """
    path = pathlib.Path(path).expanduser()
    files.read_text(path)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        config = get_config() if callable(get_config) else None
    except Exception as error:
        line = f", line {number}" if (number := _line_of(error, str(path))) else ""
        message = f"{type(error).__name__} while it was run: {error}"
        raise ValueError(f"{path}{line}: {message}") from error
    if not callable(get_config):
        raise ValueError(
            f"{path}: has no function get_config(). Write one that takes hetjax.zoo.config.base(), "
            "changes fields of it and returns it."
        )
    if not isinstance(plain(config), Mapping):
        raise ValueError(f"{path}: get_config() returned {config!r}. Let it return the config.")
    return plain(config)


def plain(config: Any) -> Any:
    """An `ml_collections.ConfigDict` as nested dicts; anything else as it is."""
    # Whoever gives one has imported its package; the core does without it.
    ml_collections = sys.modules.get("ml_collections")
    is_config_dict = ml_collections and isinstance(config, ml_collections.ConfigDict)
    return config.to_dict() if is_config_dict else config


def _line_of(error: Exception, path: str) -> int | None:
    """The last line of the user's own file that the error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return lines[-1] if lines else None
