"""How small does an order keep the sums of gradients? The herding bound, beside the loss.

At the end of an epoch the bound of the order to come is found, and that of a random one, at the
parameters that were reached. An order is found while the parameters move: what is left of its
balance is what it can be worth in the epoch to come.
"""

from typing import Any

from experiments.orders import arms
from experiments.orders.results import Records, tuned_rates
from experiments.orders.tasks import Run, Task

_TIMES = 5  # in a run


def wanted(task: Task, trained: Records, measured: Records) -> list[Run]:
    """The runs that are to be done once more, with the first seed, to measure their orders."""
    if task.group:
        return []
    rates = tuned_rates(task, trained)
    if arms.LEADER not in rates:
        return []
    run = Run(task, arms.LEADER, rates[arms.LEADER], task.seeds[0])
    return [run] if run.key in trained and run.key not in measured else []


def measure(run: Run, data_dir: str | None) -> dict[str, Any]:
    """Does a run again without evaluation, and measures the orders of some epochs.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    import hetjax
    from experiments.orders import runs

    every = max(1, run.task.experiment.epochs // _TIMES)
    opened = runs.open_run(run, data_dir, {"ordering.herding_every": every})
    result = hetjax.fit(**opened.arguments(), progress=False)
    found = [line["herding"] for line in result.history if line.get("herding")]
    norms = [name for name in found[0] if name.endswith("_norm")]
    return runs.named(run) | {
        "epochs": [bounds["epoch"] for bounds in found],
        **{name: [runs.rounded(bounds[name]) for bounds in found] for name in norms},
        "secs": round(result.summary["wall_secs"], 1),
    }
