"""``python -m hetjax.report DIR``: makes ``report.html`` again from the files of a run."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

from hetjax.report import page


def read_run(directory: pathlib.Path) -> tuple[dict, dict, list[dict]]:
    """`(config, summary, history)` of a work directory; a summary may be missing.

    Raises:
        ValueError: a file is missing or is not JSON. A last line that was cut off while it was
            being written is left out.
    """
    config = _read_json(directory / "config.json")
    summary_path = directory / "summary.json"
    summary = _read_json(summary_path) if summary_path.exists() else {}
    metrics = directory / "metrics.jsonl"
    if not metrics.exists():
        raise ValueError(f"{metrics} is missing: a work directory of a hetjax run has one")
    history: list[dict] = []
    lines = metrics.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        try:
            history.append(json.loads(line))
        except ValueError as error:
            if i + 1 < len(lines):
                raise ValueError(f"{metrics}, line {i + 1} is not JSON: {error}") from error
    return config, summary, history


def _read_json(path: pathlib.Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} is missing: a work directory of a hetjax run has one")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the run in a directory, writes its page, and prints where it lies."""
    parser = argparse.ArgumentParser(
        prog="python -m hetjax.report",
        description="Writes report.html again from the files of a run.",
    )
    parser.add_argument("directory", type=pathlib.Path, help="the work directory of the run")
    directory = parser.parse_args(arguments).directory.expanduser()
    try:
        config, summary, history = read_run(directory)
    except ValueError as error:
        parser.error(str(error))
    page.write_report(directory / "report.html", config=config, summary=summary, history=history)
    print(directory / "report.html")


if __name__ == "__main__":
    main()
