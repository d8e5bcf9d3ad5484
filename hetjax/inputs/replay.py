"""Runs the rounds of an earlier run again: its trace decides quotas instead of clocks."""

import json
import pathlib
from typing import NamedTuple

import numpy as np

from hetjax import messages


class TracedRound(NamedTuple):
    quotas: np.ndarray  # i64[W]
    microbatches_done: np.ndarray  # i64[W]


def read_trace(path: str | pathlib.Path, num_workers: int) -> list[TracedRound]:
    """The rounds in a `metrics.jsonl`.

    Raises:
        ValueError: if the file is missing, a line is no record of a round, or the number of
            workers differs.
    """
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"replay: there is no file {str(path)!r}; give the metrics.jsonl of a run")
    rounds = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        said = f"replay: line {number} of {str(path)!r} is no record of a round ("
        with messages.as_mistake(said, (ValueError, KeyError, TypeError), after=")"):
            record = json.loads(line)
            quotas = np.asarray(record["quotas"], np.int64)
            done = np.asarray(record["microbatches_done"], np.int64)
        if quotas.shape != (num_workers,) or done.shape != (num_workers,):
            raise ValueError(
                f"replay: {str(path)!r} was written with {quotas.size} workers, this run has "
                f"{num_workers}; set cluster.num_workers={quotas.size}"
            )
        rounds.append(TracedRound(quotas, done))
    return rounds
