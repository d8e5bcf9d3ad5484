"""The figures of quotas and of the training loop, as one table.

    python -m experiments.benchmarks.quotas [--only=overhead,emulated]

First the real runs, on a machine that does nothing else, then the virtual clock.
experiments/results/quotas/README.md keeps the table.
"""

import sys

from absl import app, flags, logging

import hetjax
from experiments.benchmarks import quota_shared_cores, quota_simulation, quota_traces

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 1500, "Of `overhead`, on each side.", lower_bound=1)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # not every data set that is opened
    hetjax.use_cpu_workers(8)
    from experiments.benchmarks import (
        quota_overhead,
        quota_pooled,
        quota_training,
        rows,
        short_rounds,
        writer_overhead,
    )

    groups = {
        "overhead": lambda: quota_overhead.overhead_rows(_ROUNDS.value),
        "host": quota_overhead.host_rows,
        "one_worker": short_rounds.one_worker_rows,
        "debug": quota_overhead.debug_rows,
        "writers": writer_overhead.writer_rows,
        "emulated": quota_training.emulated_rows,
        "emulated_short": lambda: quota_training.emulated_rows(0.05),
        "compilation": quota_training.compilation_rows,
        "pooled": quota_pooled.pooled_rows,
        "steady_state": quota_simulation.steady_state_rows,
        "convergence": quota_simulation.convergence_rows,
        "reaction": quota_simulation.reaction_rows,
        "noise": quota_simulation.noise_rows,
        "stationary": quota_traces.stationary_rows,
        "changing": quota_traces.changing_rows,
        "hiccups": quota_traces.hiccup_rows,
        "shared_cores": quota_shared_cores.shared_core_rows,
        "membership": quota_simulation.membership_rows,
        "solver": quota_simulation.solver_rows,
        "comparison": quota_simulation.comparison_rows,
    }
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
