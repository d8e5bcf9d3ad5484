"""The lines of a bilevel run: one an outer step, and one a round of each level."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hetjax import reported, types
from hetjax.bilevel.rounds import level, run


def _no_variables() -> types.PyTree:
    raise ValueError("report.x and report.y: a callback asks for them while it runs")


class OuterCounts(NamedTuple):
    """What the rounds of an outer step did."""

    rounds: int
    """Of both levels."""
    examples: dict[str, int]
    """Processed, of each level; those done again count too."""
    revisits: dict[str, int]
    """Of them, in rounds of a batch that was held."""
    bytes_sent: float
    """Bytes by all workers, as the reducer counts them."""


class OuterTimes(NamedTuple):
    """When an outer step was; seconds of the run's clock."""

    start_secs: float
    """When its first round began."""
    step_secs: float
    """Seconds of its rounds, each to the start of the next one."""
    waiting_fraction: float
    """0 to 1: of the workers' time."""


class OuterInfo(NamedTuple):
    """What the estimator found beside the hypergradient; None where it has no such thing."""

    lower_loss: float | None = None
    """f, of a value gap at the end, else before the last lower step."""
    gap: float | None = None
    """f(x, y) - f(x, z), of a value gap."""
    residual: float | None = None
    """Of the linear system, over the norm of its right side."""
    multiplier: float | None = None
    """Of the gap."""
    step_chosen: float | None = None
    """The lower step that was taken."""
    curvature: float | None = None
    """The least that conjugate gradients met."""
    crossed: float | None = None
    """Lower steps that a barrier halved."""
    stood: float | None = None
    """Lower steps that a barrier let stand."""


@dataclasses.dataclass(frozen=True)
class OuterReport(reported.Grouped):
    """One outer step, on the host: a line of `metrics.jsonl`, and what callbacks are given.

    Numbers are at the upper variable before the step's update.
    """

    step: int
    """Number of the outer step, from 0."""
    upper_loss: float
    """F at the lower variable that was reached; NaN where no request asks for it."""
    hypergradient_norm: float
    """Euclidean."""
    counts: OuterCounts
    """What its rounds did: examples, bytes."""
    times: OuterTimes
    """When it was, and how long it took."""
    info: OuterInfo
    """What the estimator found beside the hypergradient."""
    eval: dict[str, float] | None = None
    """By name, where it was evaluated after this outer step."""
    kinds: dict[str, dict[str, Any]] | None = None
    """Of each kind of round of a level: `rounds`, `secs`, `bytes_sent`, and the last `quotas`."""
    x: Callable[[], types.PyTree] = reported.while_called(_no_variables)
    """`report.x()` is the upper variable after the step. For a callback, while it runs."""
    y: Callable[[], types.PyTree] = reported.while_called(_no_variables)
    """`report.y()` is the lower variable after the step. For a callback, while it runs."""


RoundLine = dict[str, Any]


def of_rounds(step: run.OuterStep, index: int, start_secs: float) -> list[RoundLine]:
    """A line a round, as `RoundReport` has it, with its level and what was asked."""
    lines = []
    for asked in step.asked:
        read = asked.report.read()
        of_round = {
            "start_secs": reported.plain(start_secs),
            "bytes_sent": round(asked.bytes_sent),
            "step": index,
            "level": asked.what.level,
            "request": level.kind_name(asked.what),
            "is_new": asked.what.is_new,
        }
        start_secs += read.times.round_secs
        lines.append(read.to_plain() | of_round)
    return lines


def of_step(
    step: run.OuterStep,
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
        found = {"rounds": 1, "secs": line["round_secs"], **line}
        add_kind(kinds, f"{line['level']}: {line['request']}", found)
    always = ("upper_loss", "hypergradient_norm")
    known: dict[str, Any] = {k: v for k, v in numbers.items() if k in always or not math.isnan(v)}
    return OuterReport.of(
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


def add_kind(kinds: dict[str, dict[str, Any]], name: str, found: dict[str, Any]) -> None:
    """Adds what rounds of a kind took to `OuterReport.kinds`."""
    kind = kinds.setdefault(name, {"rounds": 0, "secs": 0.0, "bytes_sent": 0})
    for number in ("rounds", "secs", "bytes_sent"):
        kind[number] += found[number]
    kind["quotas"] = found["quotas"]


def numbers_of(info: dict[str, Any]) -> dict[str, float]:
    """Of an outer step's info, without worker axis, those that there are; F in any case."""
    found = {name: float(value) for name, value in info.items() if not isinstance(value, tuple)}
    return {"upper_loss": math.nan, **found}
