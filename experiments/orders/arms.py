"""The orders that are compared, by the names that their results have."""

from collections.abc import Mapping
from typing import Any, NamedTuple

BASELINE = "random_reshuffling"  # D-RR: what every other order is compared with


class Arm(NamedTuple):
    label: str
    colour: str
    cost: float  # of a round, over a plain one: for the estimate of the time left alone
    ordering: Mapping[str, Any]  # as `hetjax.fit` takes it


def _arm(label: str, colour: str, cost: float, method: str, **options: Any) -> Arm:
    return Arm(label, colour, cost, {"method": method, **options})


ARMS = {  # the colours can be told apart by everybody
    BASELINE: _arm("D-RR", "#30343b", 1.0, BASELINE),
    "d_grab": _arm("D-GraB, two-level", "#0072b2", 1.7, "d_grab"),
    "d_grab_every_second": _arm(
        "D-GraB, every second epoch", "#882255", 1.35, "d_grab", balance_every=2
    ),
    "d_grab_exact": _arm("D-GraB, exact", "#d55e00", 2.8, "d_grab_exact"),
    "pair_balance_exact": _arm(
        "independent PairBalance, exact", "#009e73", 2.8, "pair_balance_exact"
    ),
    "pair_balance": _arm("independent PairBalance, in blocks", "#117733", 1.7, "pair_balance"),
    "fixed_map": _arm("fixed map", "#e69f00", 1.0, "fixed_map"),
    "block_reshuffling": _arm("block reshuffling", "#56b4e9", 1.0, "block_reshuffling"),
    "shuffle_once": _arm("shuffle once", "#cc79a7", 1.0, "shuffle_once"),
}
TUNED = (BASELINE, "d_grab", "fixed_map", "block_reshuffling")
"""Each has a learning rate of its own; the others take that of `LEADER`."""
LEADER = "d_grab"
SAVING = "d_grab_every_second"
"""Makes the order anew of every second epoch: of tasks that have epochs enough for that."""
ALWAYS = (*TUNED, "d_grab_exact", "pair_balance_exact", "shuffle_once")
"""Those that every task has, unless they would take too long."""
