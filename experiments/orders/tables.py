"""What the report shows of a task: its set-up, its arms, its grid, its herding bounds, in words."""

import math
from collections.abc import Mapping, Sequence

from experiments.comparisons.spreads import Stat, in_spreads, verdict
from experiments.orders import page, pictures, results
from experiments.orders.arms import ALWAYS, ARMS, BASELINE, LEADER, TUNED
from experiments.orders.results import Arms, Record, Records, average, best, final
from experiments.orders.tasks import Task


def setup(task: Task) -> str:
    """What is trained, in a sentence or two."""
    config = task.experiment
    chosen = config.optimizer
    optimizer = [f"{chosen.name.upper() if chosen.name == 'sgd' else chosen.name}"]
    if chosen.name == "sgd":
        optimizer.append(f"momentum {chosen.momentum:g}")
    optimizer.append(f"weight decay {chosen.weight_decay:g}")
    if chosen.clip_norm:
        optimizer.append(f"the gradient clipped at a norm of {chosen.clip_norm:g}")
    part = "all of them" if task.every == 1 else f"every {task.every}th of them"
    evaluated = f"the first {task.num_eval:,}" if task.num_eval else "all"
    return (
        f"`{task.name}` (`{task.shown_file}`): {config.data.num_train:,} examples, "
        f"{config.epochs} epochs of {task.epoch_rounds:,} rounds. {config.cluster.num_workers} "
        f"workers, batch {task.batch_size} (microbatches of {config.microbatch_size}), "
        f"{', '.join(optimizer)}{_emulation(task)}. Training loss over {part}, {task.metric} over "
        f"{evaluated} of those evaluated.{_left_out(task)}"
    )


def _left_out(task: Task) -> str:
    """The orders that a task goes without."""
    names = [ARMS[arm].label for arm in ALWAYS if arm not in task.arms]
    return f" Left out: {'; '.join(names)}." if names else ""


def _emulation(task: Task) -> str:
    config = task.experiment
    if not task.is_emulated:
        return ""
    gate = config.gate.trigger
    closes = "" if gate == "none" else f", a gate ({gate})"
    return f", {config.quota.policy} quotas for emulated speeds{closes}"


def arms_table(arms: Arms) -> page.Table:
    """The figures of each arm at its learning rate."""
    metric = next((r["metric"] for runs in arms.runs.values() for r in runs.values()), "")
    header = (
        "order",
        "learning rate",
        "lowest loss",
        "in spreads from D-RR's",
        "mean loss over D-RR's",
        "epochs to D-RR's lowest",
        "ms a round",
        f"last {metric.replace('_', ' ')}",
    )
    rows = []
    for arm, rate in arms.rates.items():
        if not arms.runs[arm]:
            continue
        last = Stat.of(pictures.values_of(run)[-1] for run in arms.runs[arm].values())
        secs, lowest = arms.secs.get(arm), arms.stat(arm, best)
        rows.append(
            (
                ARMS[arm].label,
                f"{rate:g}",
                f"{lowest:.5f}",
                "" if arm == BASELINE else in_spreads(lowest, arms.stat(BASELINE, best)),
                f"{arms.paired(arm, average):.3f}",
                ratio(arms.ratios(arm)),
                f"{1e3 * secs / arms.task.epoch_rounds:.1f}" if secs else "",
                f"{last.mean:.4g}",
            )
        )
    return page.Table(header, rows)


def ratio(ratios: Sequence[float]) -> str:
    """Of epochs, or of time; where seeds never get there, how many do not."""
    never = sum(map(math.isinf, ratios))
    if never:
        return f"not by {never} of {len(ratios)}"
    return f"{Stat.of(ratios):.2f}" if ratios else ""


def grid_table(task: Task, records: Records) -> page.Table:
    """The lowest training loss of the first seed at each rate of the arms that are tuned."""
    first = task.seeds[0]
    rates = sorted({rate for arm in task.arms for rate in results.grid(task, records, arm)})
    rows = []
    for arm in [arm for arm in task.arms if arm in TUNED]:
        cells = [ARMS[arm].label]
        for rate in rates:
            record, baseline = (records.get((a, rate, first)) for a in (arm, BASELINE))
            cell = "" if record is None else f"{Stat.of([best(record)]):.5f}"
            if record is not None and baseline is not None and arm != BASELINE:
                found = _ratio(task, arm, record, baseline)
                cell += f" ({found:.2f})" if math.isfinite(found) else " (never)"
            cells.append(cell)
        rows.append(tuple(cells))
    return page.Table(("order", *(f"lr {rate:g}" for rate in rates)), rows)


def _ratio(task: Task, arm: str, record: Record, baseline: Record) -> float:
    """Epochs to the lowest loss of the other, over its own."""
    arms = Arms(task, {}, {}, {})
    arms.runs = {arm: {0: record}, BASELINE: {0: baseline}}
    return arms.ratios(arm)[0]


def herding_table(records: Records) -> page.Table | None:
    """The herding bounds of orders, over that of a random order; None where none was measured."""
    if not records:
        return None
    norms = {"two_norm": "2-norm", "inf_norm": "∞-norm"}
    header = ["order", "after epochs", *norms.values()]
    rows = []
    for (arm, _, _), record in records.items():
        if arm not in ARMS:  # of an order that hetjax has no more
            continue
        told = [[f"{value:.2f}" for value in _over_random(record, norm)] for norm in norms]
        epochs = map(str, record["epochs"])
        rows.append([ARMS[arm].label, *(" ".join(each) for each in (epochs, *told))])
    return page.Table(header, rows)


def _over_random(record: Record, name: str = "two_norm") -> list[float]:
    """A bound over that of a random order, for each epoch that was measured."""
    pairs = zip(record[name], record[f"random_{name}"], strict=True)
    return [math.nan if None in pair else pair[0] / pair[1] for pair in pairs]


def gain_table(found: Sequence[Arms], bounds: Mapping[str, Records]) -> page.Table:
    """What two-level D-GraB is worth on each task, beside what was left to balance and what was.

    Those that gain most first; tasks without its runs are left out.
    """
    rows = []
    for arms in found:
        if not arms.runs.get(LEADER) or not arms.runs.get(BASELINE):
            continue
        gain, cost = arms.paired(LEADER, average), arms.cost(LEADER)
        others = [
            in_spreads(arms.stat(LEADER, best), arms.stat(other, best))
            if arms.runs.get(other)
            else ""
            for other in (BASELINE, "fixed_map", "block_reshuffling")
        ]
        cells = [
            f"`{arms.task.name}`",
            ratio(arms.ratios(LEADER)),
            f"{cost:.2f}" if cost else "",
            ratio(arms.ratios(LEADER, of_time=True)),
            *others,
            f"{gain:.3f}",
            *_ends(bounds.get(arms.task.name, {})),
        ]
        rows.append((gain.mean, cells))
    header = (
        "task",
        "epochs to D-RR's lowest",
        "cost of a step",
        "time to it",
        "lowest loss in spreads from D-RR's",
        "from the fixed map's",
        "from block reshuffling's",
        "mean loss over D-RR's",
        "bound of a random order",
        "bound over that",
    )
    return page.Table(header, [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def _ends(bounds: Records) -> tuple[str, str]:
    """The bound of a random order and that of D-GraB's over it, first and last epoch measured."""
    for (arm, _, _), record in bounds.items():
        if arm == LEADER:
            pairs = record["random_two_norm"], _over_random(record)
            first, last = (f"{of[0]:.3g} → {of[-1]:.3g}" for of in pairs)
            return first, last
    return "", ""


def sentences(own: Arms, records: Records) -> list[str]:
    """What the tables do not say: of the tuning, who gets there first, and of changing speeds."""
    return tuning(own, records) + _soonest(own) + _change(own)


def _soonest(own: Arms) -> list[str]:
    """The ratio of epochs where an order is tuned for it: to get there first, not to end lowest."""
    arms = [arm for arm in (LEADER, "block_reshuffling") if own.runs.get(arm)]
    if not own.task.convex or not arms or not own.runs.get(BASELINE):
        return []
    found = {arm: own.soonest(arm) for arm in arms}
    told = [
        f"{ARMS[arm].label} {f'{of[1]:.2f} (lr {of[0]:g})' if of else 'at none'}"
        for arm, of in found.items()
    ]
    return [f"Epochs to D-RR's lowest at the rate that gets there first: {'; '.join(told)}."]


def tuning(own: Arms, records: Records) -> list[str]:
    """Where the grid was extended, and where the best rate lies at an end all the same."""
    task = own.task
    found = []
    if not task.is_tuned:
        return found
    for arm in [arm for arm in task.arms if arm in TUNED]:
        rates = results.grid(task, records, arm)
        for there, words in ((True, "was"), (False, "is to be")):
            added = [
                f"{rate:g}"
                for rate in rates
                if rate not in task.learning_rates
                and there == ((arm, rate, task.seeds[0]) in records)
            ]
            if added:
                label = ARMS[arm].label
                found.append(f"The grid of {label} {words} extended by {', '.join(added)}.")
        if own.rates.get(arm) in (rates[0], rates[-1]):
            found.append(f"{ARMS[arm].label} is tuned to an end of its grid, so not surely tuned.")
    return found


def _change(own: Arms) -> list[str]:
    """Of a task whose speeds change: how it stood before, and the quotas."""
    change, runs = own.task.experiment.cluster.changes, own.runs.get(LEADER)
    if not change or not runs:
        return []
    epoch = own.task.experiment.epochs // 2
    at = [own.stat(m, lambda run: results.losses_of(run)[epoch - 1]) for m in (LEADER, BASELINE)]
    quotas = next(iter(runs.values()))["quotas"]
    shown = "; ".join(f"{' '.join(map(str, row))} from round {start}" for start, row in quotas)
    return [
        f"Before the change of speeds in round {change[0].round} (loss after epoch {epoch}): "
        f"two-level D-GraB {verdict(*at)}. Quotas of its first seed: {shown}."
    ]


def group_table(found: Mapping[str, Arms]) -> page.Table:
    """One table of variants at one rate each: which decay, sizes and rates show a gain."""
    rows = []
    for arms in found.values():
        for arm in arms.rates:
            rows.append(
                (
                    arms.task.title.partition(", n = ")[0],
                    ARMS[arm].label,
                    f"{arms.stat(arm, best):.5f}",
                    f"{arms.stat(arm, final):.5f}",
                    f"{arms.stat(arm, average):.5f}",
                    f"{arms.paired(arm, average):.3f}",
                    ratio(arms.ratios(arm)),
                    len(arms.runs[arm]),
                )
            )
    header = ("variant", "order", "lowest loss", "last loss", "mean loss", "over D-RR's",
              "epochs to D-RR's lowest", "n")  # fmt: skip
    return page.Table(header, rows)
