"""How fast are examples read that a disk or a network keeps back, by one thread and by several?"""

import statistics
import time
from typing import Any

import numpy as np

import hetjax
from experiments.benchmarks.rows import Row

NUM_EXAMPLES, READ_SECS, WIDTH = 8_000, 0.002, 8


class Waiting:
    """Each example comes after 2 ms, in which another thread may ask for its own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(NUM_EXAMPLES, WIDTH)).astype(np.float32)
        self._y = (self._x.sum(axis=1) > 0).astype(np.float32)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        time.sleep(READ_SECS)
        return {"x": self._x[index], "y": self._y[index]}


def _fit(feed: str, readers: int) -> dict[str, Any]:
    """An epoch on four workers: seconds of the rounds and in all, what was read, parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        return jnp.logaddexp(0.0, batch["x"] @ params) - batch["y"] * (batch["x"] @ params)

    source, began = Waiting(), time.perf_counter()
    result = hetjax.fit(
        loss_fn,
        np.zeros(WIDTH, np.float32),
        optax.sgd(0.1),
        source,
        epochs=1,
        microbatch_size=16,
        budget=16,
        cluster={"num_workers": 4},
        quota={"policy": "equal"},
        data={"feed": feed, "readers": readers},
        progress=False,
    )
    secs = time.perf_counter() - began
    return {
        "secs": secs,
        "round_secs": result.summary["train_secs"],
        "lost": result.summary["examples_missing"] + result.summary["examples_duplicated"],
        "reads": np.bincount(source.reads, minlength=NUM_EXAMPLES),
        "params": np.asarray(result.params),
    }


def reading_rows(repeats: int = 3) -> list[Row]:
    """One reader against the default, in turn; the first pair warms up and is not counted."""
    rows = []
    for feed, secs in (("streamed", "round_secs"), ("resident", "secs")):
        pairs = [[_fit(feed, readers) for readers in (1, 0)] for _ in range(1 + repeats)][1:]
        ratios = [one[secs] / several[secs] for one, several in pairs]
        rates = [[NUM_EXAMPLES / run[secs] for run in runs] for runs in zip(*pairs, strict=True)]
        runs = [run for pair in pairs for run in pair]
        lost = sum(run["lost"] for run in runs)
        # What is read before an epoch to try the source out comes on top, of a few examples.
        least = min(int(run["reads"].min()) for run in runs)
        usual = max(int(np.median(run["reads"])) for run in runs)
        equal = all(np.array_equal(run["params"], runs[0]["params"]) for run in runs)
        what = "rounds of an epoch" if feed == "streamed" else "fit, all in all"
        rows.append(
            Row(
                f"{NUM_EXAMPLES:,} examples of {READ_SECS * 1e3:g} ms each, {feed}, 4 workers, "
                f"{what}: examples a second, data.readers=1 and the default; ratio, median of "
                f"{repeats} in turn (least to most); examples lost or doubled; readings of an "
                "example, least and median; parameters equal to the bit",
                "ratio ≥ 4; 0; 1, 1; yes" if feed == "streamed" else "none",
                f"{statistics.median(rates[0]):.0f} and {statistics.median(rates[1]):.0f}; "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
                f"{lost}; {least}, {usual}; {'yes' if equal else 'no'}",
            )
        )
    return rows
