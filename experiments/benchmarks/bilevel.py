"""The figures of bilevel problems in rounds, as one table.

    python -m experiments.benchmarks.bilevel [--only=exact,requests,bytes,gates,gossip]

The table is kept in experiments/results/bilevel/rounds.md. Run from the root of the repository: the
rule is that of the tests.
"""

import sys

from absl import app, flags

from experiments.benchmarks import bilevel_rounds, rows
from hetjax import mesh

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    groups = {
        "bytes": bilevel_rounds.bytes_rows,
        "gates": bilevel_rounds.gate_rows,
        "gossip": bilevel_rounds.gossip_rows,
        "requests": bilevel_rounds.cost_rows,
        "exact": bilevel_rounds.exact_rows,
    }
    mesh.use_cpu_workers(8)
    rows.print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
