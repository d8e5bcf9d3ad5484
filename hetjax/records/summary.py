"""The numbers of a whole run, kept up step by step, and `summary.json` from them."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hetjax import reported, starting
from hetjax.losses import loss as losses_lib
from hetjax.records import evaluations
from hetjax.rounds import round_report, run_state
from hetjax.rounds import setup as setup_lib


class Summary:
    """What every run tells, whatever its steps are.

    Args:
        setup: of the run.
        started: `perf_counter` when the run began.
        judge: says which evaluation is the best.
        begins: the stages before the first step.
    """

    def __init__(
        self,
        setup: setup_lib.Setup,
        *,
        started: float,
        judge: evaluations.Judge,
        begins: starting.Starting,
    ) -> None:
        self.clock = 0.0  # seconds of all steps; it stands still during evaluations
        self.stopped_by: str | None = None
        self._setup, self._started, self.judge = setup, started, judge
        self.begins = begins
        self._first_secs: float | None = None  # from then to the end of the first step
        self._eval: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._earlier_secs = 0.0  # wall time before the run was resumed
        self._resumed: list[dict[str, Any]] = []  # step and time of each checkpoint gone on from

    def save(self) -> dict[str, Any]:
        """What a resumed run needs, beside the lines: JSON values.

        Losses are texts: of a run that diverges they are not finite, and JSON has no such number.
        """
        return {
            "clock": self.clock,
            "eval": texts(self._eval),
            "best": texts(self._best),
            "resumed": self._resumed,
            "wall_secs": self._wall_secs,
        }

    def restore(self, about: dict[str, Any]) -> None:
        """Goes on from `save`, as a checkpoint has it."""
        saved = about["summary"]
        self.clock, self._earlier_secs = saved["clock"], saved["wall_secs"]
        self.take_judged(saved)
        self._resumed = saved["resumed"]
        if "saved" in about:  # in a checkpoint
            self._resumed = [*self._resumed, {"round": about["rounds"], "saved": about["saved"]}]
        else:  # by a process that goes on, while this one began
            self._earlier_secs -= time.perf_counter() - self._started

    def take_judged(self, saved: Mapping[str, Any]) -> dict[str, float]:
        """What was evaluated, from `save`; returns what last."""
        self._eval, self._best = numbers(saved["eval"]), numbers(saved["best"])
        return self._eval

    def is_better(self, values: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than the best so far."""
        return self.judge.is_better(values, {k[5:]: v for k, v in self._best.items()})

    def evaluated(self, values: dict[str, float], **beside: float) -> bool:
        """Takes an evaluation in; whether it is the best so far.

        Args:
            values: of the sets.
            beside: other numbers of that moment, by which the best may be judged.
        """
        self._eval = dict(values)
        is_best = self.is_better({**values, **beside})
        if is_best:
            self._best = {f"best_{name}": value for name, value in {**beside, **values}.items()}
        return is_best

    def step_done(self) -> None:
        """A step is over: with the first one the beginning is."""
        if self._first_secs is None:
            self.begins.over()
            self._first_secs = time.perf_counter() - self._started

    @property
    def _wall_secs(self) -> float:
        return self._earlier_secs + time.perf_counter() - self._started

    def _of_run(self, *, first: str, interrupted: bool) -> dict[str, Any]:
        """The part of `summary.json` that all runs have; `first` names the first step's seconds."""
        setup = self._setup
        return {
            "wall_secs": self._wall_secs,
            "train_secs": self.clock,
            "start": {first: self._first_secs or 0.0, **self.begins.secs},
            "interrupted": interrupted,
            "stopped_by": self.stopped_by,
            **({"resumed": self._resumed} if self._resumed else {}),
            **({"judged_by": self.judge.metric} if self.judge.metric else {}),
            "emulated": setup.speeds.emulated,
            "clock": "virtual" if setup.speeds.clock.virtual else "wall",
            "num_workers": len(setup.where.devices),
            "device_kind": setup.where.devices[0].device_kind,
            "jax_version": jax.__version__,
        }


def texts(numbers: Mapping[str, float]) -> dict[str, str]:
    """Numbers as JSON holds them to the bit, those that are not finite too."""
    return {name: repr(float(number)) for name, number in numbers.items()}


def numbers(texts: Mapping[str, str]) -> dict[str, float]:
    """Back from `texts`."""
    return {name: float(text) for name, text in texts.items()}


class TrainingSummary(Summary):
    """Adds up what `summary.json` tells of a run of training; arguments as of `Summary`."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._lines: list[reported.RoundReport] = []
        self._epoch_sums: dict[int, np.ndarray] = {}  # epoch: (loss_sum, weight_sum)
        self._epoch_metrics: dict[int, dict[str, np.ndarray]] = {}  # the same of each metric
        self._references = np.zeros(3)  # sums over full rounds, where speeds are known
        self._referenced = 0
        self.examples_recomputed = 0

    def save(self) -> dict[str, Any]:
        """As of `Summary`."""
        return super().save() | {
            "epoch_sums": jax.tree.map(_each, self._epoch_sums),
            "epoch_metrics": jax.tree.map(_each, self._epoch_metrics),
            "references": self._references.tolist(),
            "referenced": self._referenced,
        }

    def go_on(self, about: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
        """Goes on from `save`, as a checkpoint has it, after the rounds of `lines`."""
        self.restore(about)
        saved = about["summary"]
        self._lines = [reported.from_plain(line) for line in lines]
        self._epoch_sums = {int(k): np.array(v, float) for k, v in saved["epoch_sums"].items()}
        self._epoch_metrics = {
            int(epoch): {name: np.array(pair, float) for name, pair in sums.items()}
            for epoch, sums in saved["epoch_metrics"].items()
        }
        self._references, self._referenced = np.array(saved["references"]), saved["referenced"]

    def round_done(self, report: round_report.Report, **measured: Any) -> reported.RoundReport:
        """The line of a round, with what was measured after it; waits for its numbers."""
        self.step_done()
        read = report.read()
        times = read.times._replace(start_secs=self.clock)
        line = dataclasses.replace(read, times=times, **measured)
        sums = np.array([report.totals.loss_sum, report.totals.weight_sum], np.float64)
        self._epoch_sums[line.epoch] = self._epoch_sums.get(line.epoch, 0) + sums
        of_epoch = self._epoch_metrics.setdefault(line.epoch, {})
        for name, pair in dict(report.totals.metric_sums).items():
            of_epoch[name] = of_epoch.get(name, 0) + np.array(pair, np.float64)
        if report.references is not None and line.counts.full:
            self._references += report.references
            self._referenced += 1
        self.clock += line.times.round_secs
        self._lines.append(line)
        return line

    @property
    def examples_skipped(self) -> int:
        """In microbatches that were not finite."""
        return sum(line.counts.skipped_examples for line in self._lines)

    def leads_from(self, lines: Sequence[dict[str, Any]]) -> None:
        """Goes on from the lines of the leader before: the run's time is what they say it is."""
        for before, line in itertools.pairwise(lines):
            line["start_secs"] = before["start_secs"] + before["round_secs"]
        self._lines = [reported.from_plain(line) for line in lines]
        if self._lines:
            self.clock = self._lines[-1].times.start_secs + self._lines[-1].times.round_secs

    def as_dict(self, state: run_state.RunState, *, interrupted: bool) -> dict[str, Any]:
        """`summary.json`. Times are seconds; round means are over full rounds, if any."""
        lines, stream = self._lines, state.stream
        timed = [line for line in lines if line.counts.full] or lines
        round_secs = np.array([line.times.round_secs for line in timed])
        longest = np.array([_longest_secs(line) for line in timed])
        waiting = np.array([line.times.waiting_fraction for line in timed]) @ longest
        microbatches = sum(sum(line.workers.microbatches_done) for line in lines)
        last = max(self._epoch_metrics, default=0)
        means = losses_lib.means(self._epoch_metrics.get(last, {}))
        sums = self._epoch_sums[max(self._epoch_sums)] if lines else np.array([np.nan, 1.0])
        exchanges = [x for line in timed if (x := line.times.exchange_secs) is not None]
        sent = [line.counts.bytes_sent for line in lines]
        without = sum(line.update.weight_sum is not None for line in lines)
        num_workers = len(self._setup.where.devices)
        there = {tuple(line.workers.present) for line in lines}  # of W workers, or before a resume
        seats = [np.flatnonzero(of_all) for of_all in there if len(of_all) == num_workers]
        num_taken = int(max((seat.max() for seat in seats if seat.size), default=-1)) + 1
        dropped = self._setup.stream.dropped(stream)
        out: dict[str, Any] = {
            "train_loss": None if sums[1] <= 0 else float(sums[0] / sums[1]),
            **{f"train_{name}": mean for name, mean in means.items()},
            **self._eval,
            **self._best,
            "rounds": state.rounds_done,
            "epochs": stream.examples_processed / self._setup.stream.examples_per_epoch,
            **self._setup.stream.counted(stream),
            "examples_skipped": self.examples_skipped,
            **({"rounds_without_update": without} if without else {}),
            **({"examples_dropped": dropped} if dropped else {}),
            "examples_recomputed": self.examples_recomputed,
            "round_secs_mean": float(round_secs.mean()) if len(timed) else None,
            "round_secs_median": float(np.median(round_secs)) if len(timed) else None,
            **({"exchange_secs_mean": float(np.mean(exchanges))} if exchanges else {}),
            "examples_per_sec": stream.examples_processed / self.clock if self.clock else None,
            "bytes_sent_per_round": float(np.mean(sent)) if lines else None,
            "waiting_fraction": float(waiting / longest.sum()) if len(timed) else None,
            "overrun_fraction": sum(line.counts.overruns for line in lines) / max(microbatches, 1),
            **self._of_run(first="first_round", interrupted=interrupted),
            "num_workers": num_taken or num_workers,
            "quotas": timed[-1].quotas[:num_taken] if timed else [],
            **({"notes": self._setup.notes} if self._setup.notes else {}),
        }
        mixing, gate = self._setup.methods.reducer.mixing, self._setup.methods.gate
        if mixing is not None:
            measured = [line.consensus for line in lines if line.consensus]
            out["gossip"] = {
                "spectral_gap": mixing.gossip.spectral_gap,
                "num_exchanges": len(mixing.gossip.partners),
                **{f"consensus_{k}": v for k, v in (measured[-1] if measured else {}).items()},
            }
        if gate.closes:
            given = sum(sum(line.quotas) for line in lines)
            out["gate"] = {
                "trigger": self._setup.config.gate.trigger,
                "closes": gate.when,
                "returned_fraction": 1 - microbatches / max(given, 1),
                "in_flight": self._setup.config.gate.in_flight,
            }
        if self._referenced:
            optimal, bound, equal = self._references / self._referenced
            out |= {
                "optimal_round_secs": float(optimal),
                "fraction_of_optimum": float(optimal / round_secs.mean()),
                "continuous_bound_secs": float(bound),
                "equal_split_secs": float(equal),
            }
        return out


def _each(numbers: Iterable[float]) -> list[str]:
    return [repr(float(number)) for number in numbers]


def _longest_secs(line: reported.RoundReport) -> float:
    """Of compute, and of its process beside it: what `waiting_fraction` is a fraction of."""
    busy_secs = np.add(line.workers.compute_secs, line.workers.host_secs or 0.0)
    return max(line.times.local_secs, float(busy_secs.max()))
