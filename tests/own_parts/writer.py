"""A tracker of one's own: an object with two functions, `write` and `close`."""

import json
import pathlib

from hetjax import writers


class JsonLines:
    """Appends each evaluation to a file, and at the end how the run ended.

    Args:
        path: of the file.
    """

    every_secs = 5.0  # at most so often, but for evaluations; leave it out to get every record

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = pathlib.Path(path)

    def write(self, record: writers.Record) -> None:
        """Called in a thread of this writer, with steps that ascend."""
        if "eval" in record.line:
            self._add({"step": record.step, **record.scalars})

    def close(self, ended: writers.Ended) -> None:
        """Called once, also where the run was interrupted or failed."""
        self._add({"status": ended.status, "seed": ended.run.config["seed"]})

    def _add(self, found: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")
