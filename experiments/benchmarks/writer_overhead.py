"""What does a writer cost the loop? Rounds with a tracker in turn with rounds without one.

Each arm does a segment of rounds, then waits until its writer has written, so that no writer works
in another arm's segment. What is written in the background takes the processor from a few rounds
of hundreds: so means of segments are compared, not medians of rounds.
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
_SEGMENT_SECS = 3.0
_WARM_UP = 20  # rounds


class _Counted:
    """A writer that says how many records it has written, and how long they took."""

    def __init__(self, writer: Any) -> None:
        self._writer, self.every_secs, self.name = writer, writer.every_secs, writer.name
        self.secs: list[float] = []
        self.has_written = threading.Event()

    def begin(self, run: records.Run) -> None:
        self._writer.begin(run)

    def write(self, record: records.Record) -> None:
        began = time.perf_counter()
        self._writer.write(record)
        self.secs.append(time.perf_counter() - began)
        self.has_written.set()

    def close(self, ended: records.Ended) -> None:
        self._writer.close(ended)


def writer_rows(turns: int = 8) -> list[Row]:
    """Of each tracker: seconds of a segment's round over those without one, and of a hand-over."""
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
    secs: dict[str, list[float]] = {}
    put_secs: dict[str, list[float]] = {}
    counted = {name: _Counted(make()) for name, make in writers.WRITERS.items()}
    with (
        tempfile.TemporaryDirectory() as directory,
        quota_overhead.Rounds(loss_fn, params, optax.sgd(0.01), data, **fields) as rounds,
    ):
        for _ in range(_WARM_UP):
            rounds()
        opened = {"": background.Background([], records.Run({}))}
        for name, writer in counted.items():
            place = pathlib.Path(directory, name)
            place.mkdir()
            opened[name] = background.Background([writer], records.Run(rounds.run.recorded, place))
            opened[name].put(rounds.line())
            writer.has_written.wait()
            writer.secs.clear()
        for turn in range(turns):
            names = list(opened)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                of_rounds, of_puts = _segment(rounds, opened[name])
                secs.setdefault(name, []).append(of_rounds)
                put_secs.setdefault(name, []).append(of_puts)
        for name in opened:
            opened[name].close("finished")
    bare = np.array(secs.pop(""))
    return [
        Row(
            f"a writer, {name}: mean round of segments of {_SEGMENT_SECS:.0f} s over that without "
            f"one, mean of {turns} turns and its standard error; a hand-over on the loop's thread; "
            "a record in the background",
            "≤ 1 % of a round of 10 ms",
            f"{_percent(np.array(found) / bare)}; {np.median(put_secs[name]) * 1e6:.1f} µs; "
            f"{np.median(counted[name].secs) * 1e3:.2f} ms; round {bare.mean() * 1e3:.1f} ms; "
            f"load {os.getloadavg()[0]:.1f}",
        )
        for name, found in secs.items()
    ]


def _percent(ratios: np.ndarray) -> str:
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    return f"{100 * (ratios.mean() - 1):+.2f} ± {100 * error:.2f} %"


def _segment(rounds: quota_overhead.Rounds, handed: background.Background) -> tuple[float, float]:
    """Mean seconds of a round, and of handing its line over; then waits for the writer."""
    count, of_puts = 0, 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < _SEGMENT_SECS:
        rounds()
        line = rounds.line()
        before = time.perf_counter()
        handed.put(line)
        of_puts += time.perf_counter() - before
        count += 1
    mean = (time.perf_counter() - began) / count
    time.sleep(1.3)  # every_secs, and what it takes
    return mean, of_puts / count
