"""Who reads a source how fast? Threads, processes, and processes of a run that each read a stream.

    python -m experiments.benchmarks.sources [--only=GROUP,…] [--millis=5] [--epochs=2]

Groups: readers, augmented, streams. `readers` trains a small model on examples whose augmentation
holds the interpreter's lock, by one thread, by eight, and by processes. `augmented` is what a
generator for each example costs. `streams` is what a process needs to read an example itself, and
to take it from another one. experiments/results/sources/README.md keeps the tables; run it on a
machine that does nothing else.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags, logging

from experiments.benchmarks.rows import Row, print_tables

_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.")
_MILLIS = flags.DEFINE_float("millis", 5.0, "Of an augmentation.", 0.0)
_EPOCHS = flags.DEFINE_integer("epochs", 2, "Of each run.", 1)
_EXAMPLES = 256
_SHAPE = (32, 32, 3)


class Busy:
    """Augments in Python, which holds the lock: seconds of this thread's own processor time."""

    def __init__(self, secs: float) -> None:
        self._secs = secs

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        end = time.thread_time() + self._secs
        while time.thread_time() < end:
            pass
        return {"x": example["x"] + rng.normal(size=8).astype(np.float32), "y": example["y"]}


def _train(readers: int | str) -> float:
    """Seconds an example, of the epochs after the first round."""
    import optax

    import hetjax

    x = np.random.default_rng(0).normal(size=(_EXAMPLES, 8)).astype(np.float32)
    stamps: list[float] = []

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return (batch["x"] @ params - batch["y"]) ** 2

    result = hetjax.fit(
        loss_fn,
        np.zeros(8, np.float32),
        optax.sgd(0.01),
        hetjax.augmented({"x": x, "y": x.sum(1)}, Busy(_MILLIS.value / 1e3)),
        workers=1,
        microbatch_size=8,
        budget=2,
        epochs=_EPOCHS.value,
        data={"readers": readers},
        callbacks=[lambda line: stamps.append(time.perf_counter())],
        progress=False,
    )
    rounds = result.summary["rounds"]
    done = _EXAMPLES * _EPOCHS.value * (rounds - 3) / rounds
    return (stamps[-1] - stamps[2]) / done  # without the start, and what was read before it


def _readers() -> Iterator[Row]:
    alone = _train(1)
    yield Row("one thread", "", f"{alone * 1e3:.2f} ms an example")
    for readers in (8, "processes:2", "processes:4"):
        secs = _train(readers)
        name = f"{readers} threads" if isinstance(readers, int) else readers
        target = "≥ 1.7" if readers == "processes:2" else ""
        yield Row(f"{name}, over one thread", target, f"{alone / secs:.2f}x")


def _augmented() -> Iterator[Row]:
    import hetjax
    from hetjax.data import sources
    from hetjax.zoo import images

    image = np.zeros((1000, *_SHAPE), np.uint8)
    plain = [{"image": each, "label": 0} for each in image]
    for name, source in (
        ("as they are", plain),
        ("an augmentation that does nothing", hetjax.augmented(plain, lambda x, rng: x)),
        ("crops and flips", hetjax.augmented(plain, images.crops_and_flips)),
    ):
        secs = _least(lambda source=source: sources.fetch(source, np.arange(1000)))
        yield Row(f"images of 32 x 32, {name}", "", f"{secs * 1e3:.1f} µs an example")


def _least(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def _give(connection: Any, size: int, count: int) -> None:
    batch = [np.zeros(_SHAPE, np.uint8) for _ in range(size)]
    for _ in range(count):
        connection.send(batch)


def _streams() -> Iterator[Row]:
    from hetjax.data import iterables

    def images_of(count: int) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield {"image": rng.integers(0, 255, _SHAPE, np.uint8)}

    count, size = 3200, 32

    def read() -> None:
        inputs = iterables.Inputs(images_of(count), per_epoch=count, batched=False)
        for _ in range(count):
            inputs.next()

    yield Row("made and read by the process itself", "", f"{_least(read) / count * 1e6:.1f} µs")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    giver = context.Process(target=_give, args=(theirs, size, count // size + 1), daemon=True)
    giver.start()
    ours.recv()

    began = time.perf_counter()
    for _ in range(count // size):
        ours.recv()
    secs = (time.perf_counter() - began) / count
    yield Row("taken from another process, 32 at a time", "", f"{secs * 1e6:.1f} µs")
    giver.terminate()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    groups: dict[str, Callable[[], Sequence[Row]]] = {
        "readers": lambda: list(_readers()),
        "augmented": lambda: list(_augmented()),
        "streams": lambda: list(_streams()),
    }
    print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
