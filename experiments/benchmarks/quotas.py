"""The figures of quotas and of the training loop.

    python -m experiments.benchmarks.quotas [--only=overhead,emulated]

First the real runs, on a machine that does nothing else, then the virtual clock.
experiments/results/quotas/README.md keeps the tables.
"""

import functools
import subprocess
import sys
from collections.abc import Iterator

from absl import flags, logging

import hetjax
from experiments import command_line
from experiments.benchmarks import quota_simulation, rows

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "Of the CPU, in one process; else 8, or as many as workers where that counts.",
    1,
)
_ROUNDS = flags.DEFINE_integer("rounds", 1500, "Of `overhead`, on each side.", lower_bound=1)

# Of their workers. With more devices than these XLA has more threads, and short rounds are slower.
_DEVICES_OF = {"overhead": 4, "host": 4}


def _apart(name: str) -> Iterator[rows.Row | str]:
    """The rows of a group, by a process that has a device for each worker and no more."""
    command = [sys.executable, "-m", "experiments.benchmarks.quotas", f"--only={name}"]
    command += [f"--devices={_DEVICES_OF[name]}", f"--rounds={_ROUNDS.value}"]
    yield from rows.read(subprocess.check_output(command, text=True))


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # not every data set that is opened
    hetjax.use_cpu_workers(_DEVICES.value or 8)
    from experiments.benchmarks import quota_overhead, quota_training

    groups = {
        "overhead": lambda: quota_overhead.overhead_rows(_ROUNDS.value),
        "host": quota_overhead.host_rows,
        "emulated": quota_training.emulated_rows,
        "emulated_short": lambda: quota_training.emulated_rows(0.05),
        "steady_state": quota_simulation.steady_state_rows,
        "convergence": quota_simulation.convergence_rows,
        "reaction": quota_simulation.reaction_rows,
        "held_up": quota_simulation.held_up_rows,
        "noise": quota_simulation.noise_rows,
        "solver": quota_simulation.solver_rows,
        "comparison": quota_simulation.comparison_rows,
    }
    if _DEVICES.value is None:
        groups |= {name: functools.partial(_apart, name) for name in _DEVICES_OF}
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
