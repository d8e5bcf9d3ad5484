"""The figures of example orders, as one table.

    python -m experiments.benchmark_ordering [--only=steps,kernel]

Timings first, on a machine that does nothing else; on a GPU the groups `kernel`, `steps` and
`per_example` run there. The comparison on real data is `experiments.compare_orders`.
"""

import os
import platform
import sys
import time

from absl import app, flags

import hetjax

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    hetjax.use_cpu_workers(8)
    import jax

    from experiments import ordering_kernels, ordering_steps, ordering_toys

    groups = {
        "steps": ordering_steps.step_rows,
        "per_example": ordering_steps.per_example_rows,
        "memory": ordering_steps.memory_rows,
        "kernel": ordering_kernels.kernel_rows,
        "exactness": ordering_kernels.exactness_rows,
        "wire": ordering_kernels.wire_rows,
        "small_toy": ordering_toys.small_toy_rows,
        "large_toy": ordering_toys.large_toy_rows,
        "low_rank": ordering_toys.low_rank_rows,
    }
    if unknown := set(_ONLY.value) - set(groups):
        sys.exit(f"--only: there is no {', '.join(unknown)}; allowed are {', '.join(groups)}")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}, Python {platform.python_version()}, "
        f"JAX {jax.__version__}\n"
    )
    print("| figure | target | reached |\n|---|---|---|")
    for name, measure in groups.items():
        if _ONLY.value and name not in _ONLY.value:
            continue
        began = time.perf_counter()
        for row in measure():
            print(f"| {row.figure} | {row.target} | {row.reached} |", flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
