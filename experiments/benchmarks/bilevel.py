"""The figures of the bilevel estimators, as one table.

    python -m experiments.benchmarks.bilevel [--only=identities,memory,counts,plain]

Timings (`plain`) on a machine that does nothing else. The table is kept in
experiments/results/bilevel/estimators.md. Run from the root of the repository: the identities are
those of the tests.
"""

import sys

from absl import app, flags

from experiments.benchmarks import bilevel_figures, bilevel_plain, rows

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    groups = {
        "plain": bilevel_plain.plain_rows,
        "memory": bilevel_figures.memory_rows,
        "counts": bilevel_figures.count_rows,
        "identities": bilevel_figures.identity_rows,
    }
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
