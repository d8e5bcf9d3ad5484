"""The figures of the bilevel estimators, as one table.

    python -m experiments.benchmarks.bilevel [--only=identities,memory,blocks,counts,plain,
        exact,requests,bytes,gates,gossip]

Timings (`plain`, `blocks`) on a machine that does nothing else. The table is kept in
experiments/results/bilevel/estimators.md. Run from the root of the repository: the identities are
those of the tests.
"""

import sys

from absl import app, flags

from experiments.benchmarks import (
    bilevel_blocks,
    bilevel_figures,
    bilevel_plain,
    bilevel_rounds,
    rows,
)
from hetjax import mesh

_ONLY = flags.DEFINE_list("only", [], "Names of groups of rows to measure; all by default.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"Unexpected arguments: {' '.join(argv[1:])}")
    groups = {
        "plain": bilevel_plain.plain_rows,
        "memory": bilevel_figures.memory_rows,
        "blocks": bilevel_blocks.block_rows,
        "counts": bilevel_figures.count_rows,
        "identities": bilevel_figures.identity_rows,
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
