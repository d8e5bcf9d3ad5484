"""The numbers of a whole bilevel run, kept up step by step, and `summary.json` from them."""

import dataclasses
from typing import Any

from hetjax.bilevel.rounds import outer_report
from hetjax.bilevel.rounds import run as run_lib
from hetjax.records import evaluations, summary

UPPER_LOSS = "upper_loss"
BY_UPPER_LOSS = evaluations.Judge(UPPER_LOSS)
"""The recorded step with the lowest upper loss is the best."""


class BilevelSummary(summary.Summary):
    """Adds up what `summary.json` tells.

    Args:
        run: whose it is.
        **fields: of `Summary`.
    """

    def __init__(self, run: run_lib.BilevelRun, **fields: Any) -> None:
        super().__init__(run.setup, **fields)
        self._run = run
        self._totals: dict[str, float] = {"rounds": 0, "bytes_sent": 0.0, "waiting_secs": 0.0}
        self._kinds: dict[str, dict[str, Any]] = {}
        self._last: dict[str, float] = {}  # of the newest step

    def save(self) -> dict[str, Any]:
        """As of `Summary`."""
        last = summary.texts(self._last)
        return super().save() | {"totals": self._totals, "kinds": self._kinds, "last": last}

    def restore(self, about: dict[str, Any]) -> None:
        """As of `Summary`."""
        super().restore(about)
        saved = about["summary"]
        self._totals, self._kinds = saved["totals"], saved["kinds"]
        self._last = summary.numbers(saved["last"])

    def take(self, line: outer_report.OuterReport) -> None:
        """Takes the line of a step in."""
        self.step_done()
        self.clock += line.times.step_secs
        self._totals["rounds"] += line.counts.rounds
        self._totals["bytes_sent"] += line.counts.bytes_sent
        self._totals["waiting_secs"] += line.times.waiting_fraction * line.times.step_secs
        for name, kind in (line.kinds or {}).items():
            outer_report.add_kind(self._kinds, name, kind)
        if line.info.crossed:
            self._totals["crossed"] = self.crossed + int(line.info.crossed)
        found = {UPPER_LOSS: line.upper_loss, **line.info._asdict()}
        names = (UPPER_LOSS, "lower_loss", "gap", "residual", "multiplier")
        self._last = {name: found[name] for name in names if found[name] is not None}

    @property
    def crossed(self) -> int:
        """Steps of y that crossed a barrier and were taken back by half."""
        return int(self._totals.get("crossed", 0))

    def as_dict(self, state: run_lib.BilevelState, *, interrupted: bool) -> dict[str, Any]:
        """`summary.json`. Times are seconds."""
        run, per_step = self._run, max(state.steps_done, 1)
        of_run = self._of_run(first="first_step", interrupted=interrupted)
        if self.judge == BY_UPPER_LOSS:
            del of_run["judged_by"]  # no metric of an evaluation
        return {
            **self._last,
            **self._eval,
            **{k: int(v) if k == "best_step" else v for k, v in self._best.items()},
            "outer_steps": state.steps_done,
            "rounds": self._totals["rounds"],
            "cost_of_a_hypergradient": dataclasses.asdict(run.cost),
            "levels": {name: run.levels[name].counted(at) for name, at in state.levels.items()},
            "kinds": self._kinds,
            **({"steps_crossed": self.crossed} if self.crossed else {}),
            "bytes_sent_per_step": self._totals["bytes_sent"] / per_step,
            "step_secs_mean": self.clock / per_step,
            "waiting_fraction": self._totals["waiting_secs"] / self.clock if self.clock else None,
            **of_run,
        }
