"""What does a writer cost the loop? Rounds with a tracker in turn with rounds without one.

A segment of rounds with a writer stands between two without one; after it the writer is waited
for, so that none works in another's segment. What is written in the background takes the processor
from a few rounds of hundreds: so means of segments are compared, not medians of rounds. Segments of
a shared machine differ by some percent; the processor time of a writer's thread does not, and
bounds from above what it can take from the loop.
"""

import os
import pathlib
import tempfile
import threading
import time
from typing import Any

import numpy as np
import optax

from experiments import problems
from experiments.benchmarks import quota_overhead
from experiments.benchmarks.rows import Row
from hetjax import writers
from hetjax.writers import background, records

_NUM_WORKERS = 4
_SEGMENT_SECS = 2.0
_WARM_UP = 20  # rounds


class _Counted:
    """A writer that says how long its records took, and how much of the processor."""

    def __init__(self, writer: Any) -> None:
        self._writer, self.every_secs, self.name = writer, writer.every_secs, writer.name
        self.secs: list[float] = []
        self.processor_secs = 0.0
        self.has_written = threading.Event()

    def begin(self, run: records.Run) -> None:
        self._writer.begin(run)

    def write(self, record: records.Record) -> None:
        began, processor = time.perf_counter(), time.thread_time()
        self._writer.write(record)
        self.processor_secs += time.thread_time() - processor
        self.secs.append(time.perf_counter() - began)
        self.has_written.set()

    def close(self, ended: records.Ended) -> None:
        self._writer.close(ended)


def writer_rows(turns: int = 16) -> list[Row]:
    """Of each tracker: a segment's round over that of its neighbours without one, and its parts."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    loss_fn, params = problems.classifier("lenet", (32, 32, 3), input_max=255.0)
    data = problems.images(4 * _NUM_WORKERS * 20, (32, 32, 3))
    fields: dict[str, Any] = {
        "epochs": 1_000_000,
        "cluster": {"num_workers": _NUM_WORKERS},
        "quota": "equal",
        "microbatch_size": 4,
        "budget": _NUM_WORKERS,
    }
    ratios: dict[str, list[float]] = {name: [] for name in writers.WRITERS}
    put_secs: dict[str, list[float]] = {name: [] for name in writers.WRITERS}
    counted = {name: _Counted(make()) for name, make in writers.WRITERS.items()}
    none = background.Background([], records.Run({}))
    with (
        tempfile.TemporaryDirectory() as directory,
        quota_overhead.Rounds(loss_fn, params, optax.sgd(0.01), data, **fields) as rounds,
    ):
        for _ in range(_WARM_UP):
            rounds()
        opened = {}
        for name, writer in counted.items():
            place = pathlib.Path(directory, name)
            place.mkdir()
            opened[name] = background.Background([writer], records.Run(rounds.run.recorded, place))
            opened[name].put(rounds.line())
            writer.has_written.wait()
            writer.secs.clear()
            writer.processor_secs = 0.0
        before, _ = _segment(rounds, none)
        for _ in range(turns):
            for name, handed in opened.items():
                found, of_puts = _segment(rounds, handed)
                time.sleep(1.3)  # every_secs, and what it takes
                after, _ = _segment(rounds, none)
                ratios[name].append(2 * found / (before + after))
                put_secs[name].append(of_puts)
                before = after
        for handed in opened.values():
            handed.close("finished")
    return [
        Row(
            f"a writer, {name}: mean round of segments of {_SEGMENT_SECS:.0f} s over that of the "
            f"two beside without one, mean of {turns} and its standard error; a hand-over on the "
            "loop's thread; a record in the background; processor time of the background",
            "≤ 1 % of a round of 10 ms",
            f"{_percent(np.array(found))}; {np.median(put_secs[name]) * 1e6:.1f} µs; "
            f"{np.median(counted[name].secs) * 1e3:.2f} ms; "
            f"{100 * counted[name].processor_secs / (turns * _SEGMENT_SECS):.2f} % of one core; "
            f"round {before * 1e3:.1f} ms; load {os.getloadavg()[0]:.1f}",
        )
        for name, found in ratios.items()
    ]


def _percent(ratios: np.ndarray) -> str:
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    return f"{100 * (ratios.mean() - 1):+.2f} ± {100 * error:.2f} %"


def _segment(rounds: quota_overhead.Rounds, handed: background.Background) -> tuple[float, float]:
    """Mean seconds of a round, and of handing its line over."""
    count, of_puts = 0, 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < _SEGMENT_SECS:
        rounds()
        line = rounds.line()
        before = time.perf_counter()
        handed.put(line)
        of_puts += time.perf_counter() - before
        count += 1
    return (time.perf_counter() - began) / count, of_puts / count
