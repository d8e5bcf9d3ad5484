"""The lines of a bilevel run: one an outer step, and one a round of each level."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax import types
from hetjax.bilevel.rounds import level
from hetjax.bilevel.rounds import run as run_lib
from hetjax.types import plain


def _no_variables() -> types.PyTree:
    raise ValueError("report.x and report.y: a callback asks for them while it runs")


@dataclasses.dataclass(frozen=True)
class OuterReport:
    """One outer step, on the host: a line of `metrics.jsonl`, and what callbacks are given.

    Numbers are at the upper variable before the step's update.
    """

    step: int  # from 0
    upper_loss: float  # F at the lower variable that was reached; NaN where nobody asks for it
    hypergradient_norm: float
    rounds: int
    examples: dict[str, int]  # processed, of each level; those done again count too
    revisits: dict[str, int]  # of them, in rounds of a batch that was held
    start_secs: float
    step_secs: float  # of its rounds, each to the start of the next one
    waiting_fraction: float  # of the workers' time
    bytes_sent: float  # by all workers, as the reducer counts them
    lower_loss: float | None = None
    gap: float | None = None
    residual: float | None = None
    multiplier: float | None = None
    step_chosen: float | None = None
    curvature: float | None = None
    crossed: float | None = None
    stood: float | None = None
    eval: dict[str, float] | None = None  # by name, where it was evaluated after this outer step
    kinds: dict[str, dict[str, Any]] | None = None
    """Of each kind of round of a level: `rounds`, `secs`, `bytes_sent`, and the last `quotas`."""
    x: Callable[[], types.PyTree] = types.while_called(_no_variables)
    """`report.x()` is the upper variable after the step. For a callback, while it runs."""
    y: Callable[[], types.PyTree] = types.while_called(_no_variables)
    """`report.y()` is the lower variable after the step. For a callback, while it runs."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, without fields that are None; not-finite numbers are None.

        Returns:
            `{name: value}`, of numbers, texts, lists and dicts of them.
        """
        given = {name: value for name, value in vars(self).items() if name not in ("x", "y")}
        return {name: plain(value) for name, value in given.items() if value is not None}


RoundLine = dict[str, Any]


def of_rounds(step: run_lib.OuterStep, index: int, start_secs: float) -> list[RoundLine]:
    """A line a round, as `RoundReport` has it, with its level and what was asked."""
    lines = []
    for asked in step.asked:
        read = dataclasses.replace(
            asked.report.read(), start_secs=start_secs, bytes_sent=round(asked.bytes_sent)
        )
        start_secs += read.round_secs
        of_round = {
            "step": index,
            "level": asked.what.level,
            "request": level.kind_name(asked.what),
            "is_new": asked.what.is_new,
        }
        lines.append(read.to_plain() | of_round)
    return lines


def of_step(
    step: run_lib.OuterStep,
    index: int,
    rounds: list[RoundLine],
    *,
    numbers: dict[str, float],
    eval: dict[str, float] | None,
) -> OuterReport:
    """The line of an outer step.

    Args:
        step: that is done.
        index: its number.
        rounds: from `of_rounds`.
        numbers: of its info, on the host.
        eval: what was evaluated after it.
    """
    names = sorted({line["level"] for line in rounds})
    of_level = {name: [line for line in rounds if line["level"] == name] for name in names}
    again = {k: [line for line in own if not line["is_new"]] for k, own in of_level.items()}
    longest = np.array([max(line["local_secs"], *line["compute_secs"]) for line in rounds])
    waiting = np.array([line["waiting_fraction"] for line in rounds])
    kinds: dict[str, dict[str, Any]] = {}
    for line in rounds:
        name = f"{line['level']}: {line['request']}"
        kind = kinds.setdefault(name, {"rounds": 0, "secs": 0.0, "bytes_sent": 0})
        kind["rounds"] += 1
        kind["secs"] += line["round_secs"]
        kind["bytes_sent"] += line["bytes_sent"]
        kind["quotas"] = line["quotas"]
    always = ("upper_loss", "hypergradient_norm")
    known: dict[str, Any] = {k: v for k, v in numbers.items() if k in always or not math.isnan(v)}
    return OuterReport(
        step=index,
        rounds=len(rounds),
        examples={k: sum(line["examples"] for line in own) for k, own in of_level.items()},
        revisits={k: sum(line["examples"] for line in own) for k, own in again.items()},
        start_secs=rounds[0]["start_secs"],
        step_secs=sum(line["round_secs"] for line in rounds),
        waiting_fraction=float(waiting @ longest / longest.sum()) if longest.sum() else 0.0,
        bytes_sent=step.bytes_sent,
        eval=eval,
        kinds=kinds,
        **known,
    )


def numbers_of(info: dict[str, Any]) -> dict[str, float]:
    """Of an outer step's info, without worker axis, those that there are; F in any case."""
    found = {name: float(value) for name, value in info.items() if not isinstance(value, tuple)}
    return {"upper_loss": math.nan, **found}
