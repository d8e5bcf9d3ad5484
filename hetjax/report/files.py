"""What has a run left in its workdir so far? Its files, and of one that goes on its numbers."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hetjax import messages
from hetjax.report import series

_LEVELS = ("upper_rounds.jsonl", "lower_rounds.jsonl")


class Written(NamedTuple):
    """A run, as its workdir has it."""

    directory: pathlib.Path
    config: dict[str, Any]
    summary: dict[str, Any]  # empty where the run is not at its end
    history: series.History

    @property
    def has_ended(self) -> bool:
        """Whether it has written its summary."""
        return bool(self.summary)

    @property
    def numbers(self) -> dict[str, Any]:
        """Its summary, or what that would say now."""
        return self.summary or so_far(self.config, self.history)

    @property
    def is_bilevel(self) -> bool:
        """Whether its lines are of outer steps."""
        return any("upper_loss" in line for line in self.history[:1])

    def check_training(self) -> None:
        """Refuses a run whose lines are of no rounds of training; one without lines may be.

        Raises:
            ValueError: they are not.
        """
        if self.is_bilevel:
            raise ValueError(
                f"{self.directory} is a run of a bilevel problem; --watch and several runs are for "
                "training"
            )
        if not all("quotas" in line and "round" in line for line in self.history[:1]):
            lines = self.directory / "metrics.jsonl"
            raise ValueError(f"the lines of {lines} are no rounds of training")


def read(directory: pathlib.Path) -> Written:
    """The run in a directory; a summary may be missing.

    Raises:
        OSError: a file is missing.
        ValueError: a file is not JSON. A last line that was cut off while it was
            being written is left out.
    """
    config = _read_json(directory / "config.json")
    summary_path = directory / "summary.json"
    summary = _read_json(summary_path) if summary_path.exists() else {}
    return Written(directory, config, summary, read_lines(directory / "metrics.jsonl"))


def read_lines(path: pathlib.Path) -> series.History:
    """The lines of a file, without seats that no worker has taken.

    Raises:
        ValueError: as of `read`.
    """
    found: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if i + 1 < len(lines):
                raise ValueError(f"{path}, line {i + 1} is not JSON: {error}") from error
    return series.taken(found)


def rounds_of_levels(directory: pathlib.Path) -> series.History:
    """The rounds of both levels of a bilevel run, in their order."""
    found = [line for name in _LEVELS for line in read_lines(directory / name)]
    return sorted(found, key=lambda line: line["start_secs"])


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    with messages.as_mistake(f"{path} is not JSON: "):
        return json.loads(path.read_text(encoding="utf-8"))


def so_far(config: series.Record, history: series.History) -> dict[str, Any]:
    """What the summary of a run of training would say now, as far as its lines tell it."""
    cluster = series.part(config, "cluster")
    emulated = bool(cluster.get("secs_per_microbatch"))
    is_virtual = "virtual" in (config.get("local"), cluster.get("clock"))
    found: dict[str, Any] = {
        "emulated": emulated,
        "clock": "virtual" if is_virtual else "wall",
        "rounds": len(history),
    }
    if not history:
        return found
    last, full = history[-1], series.full_rounds(history)
    epochs = series.column(history, "epoch")
    of_epoch = epochs == epochs[-1]
    losses = series.column(history, "loss")[of_epoch]
    counts = np.where(np.isfinite(losses), series.column(history, "examples")[of_epoch], 0)
    if counts.sum() > 0:
        found["train_loss"] = float(np.nan_to_num(losses) @ counts / counts.sum())
    names = {"round_secs": "round_secs_mean", "bytes_sent": "bytes_sent_per_round"}
    for name in (*names, "optimal_round_secs", "waiting_fraction"):
        values = series.column(full, name)
        if np.isfinite(values).any():
            found[names.get(name, name)] = float(np.nanmean(values))
    if {"round_secs_mean", "optimal_round_secs"} <= found.keys() and found["round_secs_mean"]:
        found["fraction_of_optimum"] = found["optimal_round_secs"] / found["round_secs_mean"]
    evaluated = [line["eval"] for line in history if isinstance(line.get("eval"), Mapping)]
    return {
        **found,
        **(evaluated[-1] if evaluated else {}),
        "examples_processed": last.get("examples_processed"),
        "quotas": full[-1].get("quotas"),
        "train_secs": float(series.clock(history)[-1]),
    }
