"""The figures of example orders.

    python -m experiments.benchmarks.ordering [--only=steps,memory]

Timings first, on a machine that does nothing else; on a GPU the group `steps` runs there.
experiments/results/orders/measurements.md keeps the tables; the comparison on real data is
`experiments.compare_orders`.
"""

from absl import flags

import hetjax
from experiments import command_line

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def main() -> None:
    hetjax.use_cpu_workers(8)
    from experiments.benchmarks import ordering_steps, ordering_toys, rows

    groups = {
        "steps": ordering_steps.step_rows,
        "memory": ordering_steps.memory_rows,
        "small_toy": ordering_toys.small_toy_rows,
        "large_toy": ordering_toys.large_toy_rows,
        "low_rank": ordering_toys.low_rank_rows,
    }
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
