"""The table of figures: what was to be reached over all tasks, and what was."""

import statistics
from collections.abc import Mapping, Sequence

from experiments.benchmarks import tasks as targets
from experiments.comparisons import spreads
from experiments.comparisons.spreads import Stat
from experiments.orders import tables
from experiments.orders.arms import BASELINE, LEADER, SAVING
from experiments.orders.results import Arms, Records, best

CONVEX_RATIO, COST = 1 / 3, 1.3
Row = tuple[str, str, str]
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
        _lowest(found),
        _time(found),
        *(
            _preconditioned(arms, bounds.get(arms.task.name, {}))
            for arms in found
            if "d_grab_preconditioned" in arms.task.arms
        ),
        *_cost(found, LEADER, "two-level D-GraB"),
        *_cost(found, SAVING, "made anew of every second epoch"),
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
    name = "tasks that train by one command and reach their metric"
    return name, "all that have one", f"{_yes(not missed)}: {words}"


def _epochs(convex: Sequence[Arms]) -> Row:
    """How many of the convex tasks need a third of D-RR's epochs."""
    name = "convex tasks: epochs of two-level D-GraB to D-RR's lowest training loss"
    means = [Stat.of(ratios).mean for arms in convex if (ratios := arms.ratios(LEADER))]
    if not means:
        return name, f"≤ {CONVEX_RATIO:.2f} on all", NOT_RUN
    enough = sum(mean <= CONVEX_RATIO for mean in means)
    told = f"{_yes(enough == len(convex))}: {enough} of {len(convex)}, the fewest {min(means):.2f}"
    return name, f"≤ {CONVEX_RATIO:.2f} on all", told + _so_far(convex)


def _lowest(found: Sequence[Arms]) -> Row:
    """How many tasks end lower, and how many higher, by more than the spread."""
    name = "tasks whose lowest training loss with two-level D-GraB is below D-RR's by more than "
    name += "the spread; above it by more"
    pairs = [(arms.stat(LEADER, best), arms.stat(BASELINE, best)) for arms in found]
    known = [pair for pair in pairs if min(stat.num_seeds for stat in pair)]
    below = sum(spreads.below(one, other) for one, other in known)
    above = sum(spreads.below(other, one) for one, other in known)
    return name, "told", f"{below} of {len(known)}; {above}{_so_far(found)}"


def _time(found: Sequence[Arms]) -> Row:
    """Time to D-RR's loss, where epochs are gained."""
    name = "tasks of fewer epochs that take less time to D-RR's lowest training loss, too, "
    name += "ordering's cost counted"
    gain = [arms for arms in found if Stat.of(arms.ratios(LEADER)).mean < 1]
    of_time = [arms.ratios(LEADER, of_time=True) for arms in gain]
    sooner = sum(Stat.of(ratios).mean < 1 for ratios in of_time)
    return name, "all", f"{_yes(sooner == len(gain))}: {sooner} of {len(gain)}{_so_far(found)}"


def _preconditioned(arms: Arms, bounds: Records) -> Row:
    """Against plain balancing: the loss, and the herding bounds of both in both metrics."""
    name = f"{arms.task.title}: preconditioned against plain balancing under Adam"
    one, other = (arms.stat(arm, best) for arm in ("d_grab_preconditioned", LEADER))
    if not one.num_seeds or not other.num_seeds:
        return name, "told", NOT_RUN
    words = f"lowest training loss {spreads.verdict(one, other)}"
    words += f" ({one:.5f}, {other:.5f}){_so_far([arms])}"
    for kind, metric in tables.METRICS.items():
        kept = [tables.kept_balance(bounds, a, kind) for a in ("d_grab_preconditioned", LEADER)]
        if None not in kept:
            words += f"; herding bound over random{metric}: {kept[0]:.2f}, {kept[1]:.2f}"
    return name, "told", words


def _cost(found: Sequence[Arms], arm: str, order: str) -> list[Row]:
    """One row; none where no task has the order."""
    name = f"cost of an ordered step ({order}) over a plain one, each task"
    costs = {arms.task.name: arms.cost(arm) for arms in found if arm in arms.task.arms}
    known = {task: cost for task, cost in costs.items() if cost is not None}
    target = f"≤ {COST:g} on at least half"
    if not costs:
        return []
    if not known:
        return [(name, target, "not measured yet")]
    enough = sum(cost <= COST for cost in known.values())
    told = f"{enough} of {len(known)} (median {statistics.median(known.values()):.2f})"
    if len(known) < len(costs):
        left = len(costs) - len(known)
        return [(name, target, f"so far {told}; {left} tasks not measured yet")]
    return [(name, target, f"{_yes(2 * enough >= len(costs))}: {told}")]


def _so_far(found: Sequence[Arms]) -> str:
    """What is said of figures whose runs are not all there."""
    return " (so far: runs are missing)" if any(arms.lacking for arms in found) else ""


def _yes(reached: bool) -> str:
    return REACHED if reached else MISSED
