"""The numbers of a whole bilevel run, kept up step by step, and `summary.json` from them."""

import dataclasses
import math
import time
from typing import Any

import jax

from hetjax import starting
from hetjax.levels import lines
from hetjax.levels import run as run_lib


class Summary:
    """Adds up what `summary.json` tells.

    Args:
        run: whose it is.
        started: `perf_counter` when the run began.
        begins: the stages before the first round.
    """

    def __init__(
        self, run: run_lib.BilevelRun, *, started: float, begins: starting.Starting
    ) -> None:
        self._run, self._started, self._begins = run, started, begins
        self._first_secs: float | None = None
        self.clock = 0.0  # seconds of all steps; it stands still during evaluations
        self._totals: dict[str, float] = {"rounds": 0, "bytes_sent": 0.0, "waiting_secs": 0.0}
        self._kinds: dict[str, dict[str, Any]] = {}
        self._last: dict[str, float] = {}  # of the newest step
        self._eval: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._lowest = math.inf
        self._earlier_secs = 0.0
        self.stopped_by: str | None = None
        self._resumed: list[dict[str, Any]] = []

    def is_best(self, upper_loss: float, step: int) -> bool:
        """Whether no recorded step had a lower upper loss; takes it in."""
        if not upper_loss < self._lowest:
            return False
        self._lowest = upper_loss
        self._best = {"best_upper_loss": upper_loss, "best_step": step}
        return True

    def evaluated(self, values: dict[str, float], *, is_best: bool) -> None:
        """Takes an evaluation in."""
        self._eval = dict(values)
        if is_best:
            self._best |= {f"best_{name}": value for name, value in values.items()}

    def step_done(self, line: lines.OuterReport) -> None:
        """Takes the line of a step in."""
        if self._first_secs is None:
            self._begins.over()
            self._first_secs = time.perf_counter() - self._started
        self.clock += line.step_secs
        self._totals["rounds"] += line.rounds
        self._totals["bytes_sent"] += line.bytes_sent
        self._totals["waiting_secs"] += line.waiting_fraction * line.step_secs
        for name, of_kind in (line.kinds or {}).items():
            kind = self._kinds.setdefault(name, {"rounds": 0, "secs": 0.0, "bytes_sent": 0})
            for number in ("rounds", "secs", "bytes_sent"):
                kind[number] += of_kind[number]
            kind["quotas"] = of_kind["quotas"]
        if line.crossed:
            self._totals["crossed"] = self._totals.get("crossed", 0) + int(line.crossed)
        names = ("upper_loss", "lower_loss", "gap", "residual", "multiplier")
        self._last = {n: value for n in names if (value := getattr(line, n)) is not None}

    @property
    def crossed(self) -> int:
        """Steps of y that crossed a barrier and were taken back by half."""
        return int(self._totals.get("crossed", 0))

    def save(self) -> dict[str, Any]:
        """What a resumed run needs: JSON values."""
        numbers = {
            "last": self._last,
            "eval": self._eval,
            "best": self._best,
            "lowest": {"lowest": self._lowest},
        }
        return {
            "clock": self.clock,
            "totals": self._totals,
            "kinds": self._kinds,
            **{k: {n: repr(float(x)) for n, x in v.items()} for k, v in numbers.items()},
            "resumed": self._resumed,
            "wall_secs": self._earlier_secs + time.perf_counter() - self._started,
        }

    def restore(self, about: dict[str, Any]) -> None:
        """Goes on from `save`, as a checkpoint has it."""
        saved = about["summary"]
        self.clock, self._totals, self._kinds = saved["clock"], saved["totals"], saved["kinds"]
        self._last, self._eval, self._best, lowest = (
            {name: float(text) for name, text in saved[field].items()}
            for field in ("last", "eval", "best", "lowest")
        )
        self._lowest, self._earlier_secs = lowest["lowest"], saved["wall_secs"]
        self._resumed = [*saved["resumed"], {"round": about["rounds"], "saved": about["saved"]}]

    def as_dict(self, state: run_lib.BilevelState, *, interrupted: bool) -> dict[str, Any]:
        """`summary.json`. Times are seconds."""
        run, steps = self._run, state.steps_done
        parts, per_step = run.parts, max(state.steps_done, 1)
        return {
            **self._last,
            **self._eval,
            **{k: int(v) if k == "best_step" else v for k, v in self._best.items()},
            "outer_steps": steps,
            "rounds": self._totals["rounds"],
            "cost_of_a_hypergradient": dataclasses.asdict(run.cost),
            "levels": {
                "upper": run.upper.counted(state.upper),
                "lower": run.lower.counted(state.lower),
            },
            "kinds": self._kinds,
            **({"steps_crossed": self.crossed} if self.crossed else {}),
            "bytes_sent_per_step": self._totals["bytes_sent"] / per_step,
            "train_secs": self.clock,
            "step_secs_mean": self.clock / per_step,
            "waiting_fraction": self._totals["waiting_secs"] / self.clock if self.clock else None,
            "wall_secs": self._earlier_secs + time.perf_counter() - self._started,
            "start": {"first_step": self._first_secs or 0.0, **self._begins.secs},
            "interrupted": interrupted,
            "stopped_by": self.stopped_by,
            **({"resumed": self._resumed} if self._resumed else {}),
            "emulated": parts.emulated,
            "clock": "virtual" if parts.virtual_clock else "wall",
            "num_workers": len(parts.devices),
            "device_kind": parts.devices[0].device_kind,
            "jax_version": jax.__version__,
        }
