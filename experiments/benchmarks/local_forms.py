"""What does a round take in each local form? Figures of whole runs, in turn in one process."""

import contextlib
import statistics
import time

import optax

from experiments import problems
from experiments.benchmarks import quota_overhead
from experiments.benchmarks.rows import Row

_MICROBATCH_SIZE = 32


def form_rows(num_rounds: int = 60, quota: int = 4) -> list[Row]:
    """A round of each local form, in turn in one process."""
    rows = []
    optimizer, num_workers = optax.sgd(0.01, momentum=0.9), 4
    data = problems.images(_MICROBATCH_SIZE * num_workers * quota * 20, (32, 32, 3))
    for name, title in (("lenet", "LeNet"), ("mlp", "MLP 3072-1024-1024-1024-10")):
        options = {"hidden": (1024, 1024, 1024)} if name == "mlp" else {}
        loss_fn, params = problems.classifier(name, (32, 32, 3), input_max=255.0, **options)
        with contextlib.ExitStack() as stack:
            runs = {}
            for form in ("stepped", "fused", "virtual"):
                runs[form] = stack.enter_context(
                    quota_overhead.Rounds(
                        loss_fn,
                        params,
                        optimizer,
                        data,
                        epochs=1_000_000,
                        microbatch_size=_MICROBATCH_SIZE,
                        budget=num_workers * quota,
                        cluster={"num_workers": num_workers},
                        quota={"policy": "equal"},
                        local=form,
                    )
                )
            secs: dict[str, list[float]] = {form: [] for form in runs}
            for index in range(num_rounds + 5):
                for form, run in runs.items():
                    began = time.perf_counter()
                    run()
                    if index >= 5:
                        secs[form].append(time.perf_counter() - began)
        texts = []
        for form, values in secs.items():
            low, median, high = (1e3 * q for q in statistics.quantiles(values, n=4))
            texts.append(f"{form} {median:.1f} ({low:.1f} to {high:.1f})")
        rows.append(
            Row(
                f"{title}, a round of {num_workers} workers of {quota} microbatches of "
                f"{_MICROBATCH_SIZE} in each local form: ms, median and quartiles of {num_rounds}",
                "none",
                ", ".join(texts),
            )
        )
    return rows
