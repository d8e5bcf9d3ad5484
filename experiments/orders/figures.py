"""The table of figures: what was to be reached, and what was, each in words and from a file."""

import statistics
from collections.abc import Mapping, Sequence

from experiments.benchmarks import tasks as targets
from experiments.comparisons.spreads import Stat, in_spreads, verdict
from experiments.orders import tables
from experiments.orders.arms import ARMS, BASELINE, LEADER, SAVING
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
    convex = [arms for arms in found if arms.task.convex]
    others = [arms for arms in found if not arms.task.convex]
    return [
        _tasks(),
        *(_convex(arms, bounds.get(arms.task.name, {})) for arms in convex),
        *(_against_all(arms, bounds.get(arms.task.name, {})) for arms in others),
        *(row for arms in found for row in _time(arms)),
        *_cost(found, LEADER, "two-level D-GraB"),
        *_cost(found, SAVING, "made anew of every second epoch"),
        (
            "report rebuilt from results",
            "< 30 s",
            "`--stage=report` prints its seconds; every number here is of a file in `runs/`, "
            "`herding/` or `../tasks/`",
        ),
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


def _convex(arms: Arms, bounds: Records) -> Row:
    """Epochs to D-RR's lowest training loss, with what explains it where it is missed."""
    name = f"{arms.task.title}: epochs to D-RR's lowest training loss, two-level D-GraB"
    ratios = arms.ratios(LEADER)
    if not ratios:
        return name, "≤ 1/3", NOT_RUN
    met = Stat.of(ratios).mean <= CONVEX_RATIO
    words = f"{_verdict(arms, met)}: {tables.ratio(ratios)}"
    words += _others(arms, SAVING, "d_grab_exact", "fixed_map", "block_reshuffling")
    return name, "≤ 1/3", words + _soonest(arms) + _balance(bounds)


def _soonest(arms: Arms) -> str:
    """The same ratio where an order is tuned for it: to get there first, not to end lowest."""
    told = []
    for arm in (LEADER, "block_reshuffling"):
        if arm not in arms.runs:
            continue
        found = arms.soonest(arm)
        told.append(
            f"{ARMS[arm].label} {f'{found[1]:.2f} (lr {found[0]:g})' if found else 'at none'}"
        )
    seed = arms.task.seeds[0]
    return f". At the learning rate that gets there first, seed {seed}: {'; '.join(told)}"


def _others(arms: Arms, *others: str, of_time: bool = False) -> str:
    """The same ratio of other orders, for those that have one."""
    found = {arm: tables.ratio(arms.ratios(arm, of_time=of_time)) for arm in others}
    return "".join(f"; {ARMS[arm].label} {words}" for arm, words in found.items() if words)


def _balance(bounds: Records) -> str:
    """What is left of the balance of D-GraB's orders, for the parameters that they come to."""
    kept = tables.kept_balance(bounds, LEADER)
    if kept is None:
        return ""
    return f". Herding bound of its orders to come {kept:.2f} of a random order's"


def _against_all(arms: Arms, bounds: Records) -> Row:
    """The lowest training loss against three others, in units of the spread."""
    name = f"{arms.task.title}: lowest training loss of two-level D-GraB"
    target = "told; a gain where below by more than the spread"
    others = [arm for arm in (BASELINE, "fixed_map", "block_reshuffling") if arms.runs.get(arm)]
    own = arms.stat(LEADER, best)
    if not own.num_seeds or BASELINE not in others:
        return name, target, NOT_RUN
    words = [
        f"against {ARMS[arm].label} {in_spreads(own, arms.stat(arm, best))}, "
        f"{verdict(own, arms.stat(arm, best))}"
        for arm in others
    ]
    return name, target, "; ".join(words) + _so_far(arms, *others) + _balance(bounds)


def _time(arms: Arms) -> list[Row]:
    """Time to D-RR's loss, where epochs are gained."""
    ratios = arms.ratios(LEADER)
    if not ratios or not Stat.of(ratios).mean < 1:
        return []
    name = f"{arms.task.title}: time to D-RR's lowest training loss, ordering's cost counted"
    times, cost = arms.ratios(LEADER, of_time=True), arms.cost(LEADER)
    if not times or cost is None:
        return [(name, "< 1", "not measured yet")]
    met = Stat.of(times).mean < 1
    reason = (
        ""
        if met
        else f": {tables.ratio(ratios)} of the epochs at {cost:.2f} times the cost of a step"
    )
    words = f"{_verdict(arms, met)}: {tables.ratio(times)}{reason}"
    return [(name, "< 1", words + _others(arms, SAVING, "block_reshuffling", of_time=True))]


def _cost(found: Sequence[Arms], arm: str, order: str) -> list[Row]:
    """One row; none where no task has the order."""
    name = f"cost of an ordered step ({order}) over a plain one, each task"
    costs = {arms.task.name: arms.cost(arm) for arms in found if arm in arms.task.arms}
    known = {task: cost for task, cost in costs.items() if cost is not None}
    target = f"≤ {COST:g} on at least half, told on all"
    if not costs:
        return []
    if not known:
        return [(name, target, "not measured yet")]
    enough = sum(cost <= COST for cost in known.values())
    words = ", ".join(f"`{task}` {cost:.2f}" for task, cost in known.items())
    told = f"{enough} of {len(known)} (median {statistics.median(known.values()):.2f}): {words}"
    if len(known) < len(costs):
        left = len(costs) - len(known)
        return [(name, target, f"so far {told}; {left} tasks not measured yet")]
    return [(name, target, f"{_yes(2 * enough >= len(costs))}: {told}")]


def _so_far(arms: Arms, *others: str) -> str:
    """What is said of figures whose runs are not all there."""
    return " (so far: runs are missing)" if arms.lacking & {LEADER, BASELINE, *others} else ""


def _verdict(arms: Arms, met: bool) -> str:
    """None yet where runs are missing."""
    return "so far" if arms.lacking & {LEADER, BASELINE} else _yes(met)


def _yes(reached: bool) -> str:
    return REACHED if reached else MISSED
