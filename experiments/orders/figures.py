"""The table of figures: what was to be reached over all tasks, and what was."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from experiments.benchmarks import tasks as targets
from experiments.benchmarks.rows import Row
from experiments.comparisons import spreads
from experiments.comparisons.spreads import Stat
from experiments.orders.arms import BASELINE, LEADER, SAVING
from experiments.orders.results import Arms, Records, best

CONVEX_RATIO, COST = 1 / 3, 1.3
REACHED, MISSED, NOT_RUN = "reached", "**not reached**", "not run yet"


def rows(found: Sequence[Arms], bounds: Mapping[str, Records]) -> list[Row]:
    """All rows.

    Args:
        found: the arms of each task at their own rates.
        bounds: of the tasks that were measured, by name.
    """
    return [
        _tasks(),
        _epochs([arms for arms in found if arms.task.convex]),
        *_lowest(found),
        _time(found),
        *_cost(found, LEADER, "two-level D-GraB"),
        *_cost(found, SAVING, "every second epoch"),
    ]


def _tasks() -> Row:
    found = targets.read_results()
    judged = {name: target for name, target in targets.TARGETS.items() if target.bound}
    missed = [
        f"`{name}` ({target.words} {target.shown(found[name]['numbers'][target.metric])})"
        if name in found
        else f"`{name}` (not run)"
        for name, target in judged.items()
        if name not in found or not target.is_reached(found[name]["numbers"][target.metric])
    ]
    words = f"{len(judged) - len(missed)} of {len(judged)}"
    words += f"; not {', '.join(missed)}" if missed else ""
    return Row("tasks that reach their metric", "all", f"{_yes(not missed)}: {words}", len(judged))


def _epochs(convex: Sequence[Arms]) -> Row:
    """How many of the convex tasks need a third of D-RR's epochs."""
    means = [Stat.of(ratios).mean for arms in convex if (ratios := arms.ratios(LEADER))]
    told = NOT_RUN
    if means:
        enough = sum(mean <= CONVEX_RATIO for mean in means)
        told = f"{_yes(enough == len(convex))}: {enough} of {len(convex)}"
        told += f", the fewest {min(means):.2f}{_so_far(convex)}"
    name = "convex tasks: epochs to D-RR's lowest loss"
    return Row(name, f"≤ {CONVEX_RATIO:.2f} on all", told, len(convex))


def _lowest(found: Sequence[Arms]) -> Iterator[Row]:
    """How many tasks end lower, and how many higher, by more than the spread."""
    pairs = [(arms.stat(LEADER, best), arms.stat(BASELINE, best)) for arms in found]
    known = [pair for pair in pairs if min(stat.num_seeds for stat in pair)]
    for word, count in (
        ("below", sum(spreads.below(one, other) for one, other in known)),
        ("above", sum(spreads.below(other, one) for one, other in known)),
    ):
        told = f"{count} of {len(known)}{_so_far(found)}"
        yield Row(f"lowest loss {word} D-RR's", "none", told, len(known))


def _time(found: Sequence[Arms]) -> Row:
    """Time to D-RR's loss, where epochs are gained."""
    gain = [arms for arms in found if Stat.of(arms.ratios(LEADER)).mean < 1]
    of_time = [arms.ratios(LEADER, of_time=True) for arms in gain]
    sooner = sum(Stat.of(ratios).mean < 1 for ratios in of_time)
    told = f"{_yes(sooner == len(gain))}: {sooner} of {len(gain)}{_so_far(found)}"
    return Row("tasks of fewer epochs: less time, too", "all", told, len(gain))


def _cost(found: Sequence[Arms], arm: str, order: str) -> list[Row]:
    """One row; none where no task has the order."""
    costs = {arms.task.name: arms.cost(arm) for arms in found if arm in arms.task.arms}
    known = {task: cost for task, cost in costs.items() if cost is not None}
    if not costs:
        return []
    enough = sum(cost <= COST for cost in known.values())
    told = "not measured yet"
    if known:
        told = f"{enough} of {len(known)} (median {statistics.median(known.values()):.2f})"
    if len(known) == len(costs):
        told = f"{_yes(2 * enough >= len(costs))}: {told}"
    elif known:
        told = f"so far {told}; {len(costs) - len(known)} tasks not measured yet"
    return [Row(f"cost of a step, {order}", f"≤ {COST:g} on half", told, len(known))]


def _so_far(found: Sequence[Arms]) -> str:
    """What is said of figures whose runs are not all there."""
    return " (so far: runs are missing)" if any(arms.lacking for arms in found) else ""


def _yes(reached: bool) -> str:
    return REACHED if reached else MISSED
