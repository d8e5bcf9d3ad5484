"""How do rounds grow with the number of workers? A table, and a picture if asked for.

    python -m experiments.simulate [--workers=8,64,1000,10000] [--policies=equal,adaptive]
        [--gates=none,first] [--reducers=all_reduce,d_psgd] [--graph=ring] [--picture=FILE]

Every line is a run of `hetjax.simulate`; its gain is the throughput over that of equal split
without a gate, where all workers wait, with the same reducer. Nothing is trained: without JAX it
starts in a second.
"""

import itertools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import command_line
from hetjax import gates, parts, quota, simulate, topology
from hetjax.cluster import emulate
from hetjax.config import kinds
from hetjax.topology import links

_WORKERS = flags.DEFINE_list("workers", ["8", "64", "1000", "10000"], "Numbers of workers.")
_POLICIES = flags.DEFINE_list(
    "policies", ["equal", "adaptive"], f"Of {', '.join(quota.POLICIES)}; 'static' knows the speeds."
)
_GATES = flags.DEFINE_list("gates", ["none", "first"], f"Of {', '.join(gates.GATES)}.")
_REDUCERS = flags.DEFINE_list(
    "reducers", ["all_reduce", "d_psgd"], f"Of {', '.join(topology.REDUCERS)}."
)
_GRAPH = flags.DEFINE_enum("graph", "ring", list(topology.GRAPHS), "Of the reducers that gossip.")
_ROUNDS = flags.DEFINE_integer("rounds", 100, "Rounds of each run.", lower_bound=1)
_SPEEDS = flags.DEFINE_list(
    "speeds", ["1", "1", "1", "0.5"], "Relative speeds, repeated over all workers."
)
_SECS = flags.DEFINE_float(
    "microbatch_secs", 0.1, "Mean seconds of a microbatch at speed 1.", lower_bound=1e-9
)
_MICROBATCHES = flags.DEFINE_integer(
    "microbatches", 8, "Microbatches a worker and round, in the mean.", lower_bound=1
)
_MOST = flags.DEFINE_integer(
    "max_microbatches", 0, "Cap of every worker; 0: the budget.", lower_bound=0
)
_DELAY = flags.DEFINE_enum("delay", "shifted_exponential", emulate.DELAYS, "About the means.")
_DELAY_PER = flags.DEFINE_enum(
    "delay_per", "microbatch", emulate.DELAY_PER, "What it is drawn for."
)
_QUORUM = flags.DEFINE_float(
    "quorum", 0.75, "Of gate 'quorum': share of the budget.", lower_bound=0.0, upper_bound=1.0
)
_DEADLINE = flags.DEFINE_float(
    "deadline",
    1.0,
    "Of gate 'deadline': over the workers' mean seconds of an equal quota.",
    lower_bound=1e-9,
)
_DROP = flags.DEFINE_bool("drop", False, "What is in flight when a gate closes is given up.")
_WAIT_FOR = flags.DEFINE_enum(
    "wait_for", "all", simulate.WAIT_FOR, "For whom a worker waits; 'neighbours': if it gossips."
)
_MEGABYTES = flags.DEFINE_float("megabytes", 10.0, "Of the parameters.", lower_bound=0.0)
_LATENCY = flags.DEFINE_float("latency_secs", 1e-5, "Of a message.", lower_bound=0.0)
_GIGABITS = flags.DEFINE_float("gigabits", 10.0, "A second, of a link.", lower_bound=1e-9)
_SEED = flags.DEFINE_integer("seed", 0, "Of all delays.", lower_bound=0)
_PICTURE = flags.DEFINE_string("picture", None, "A file, such as simulated.png; none by default.")


class Line(NamedTuple):
    """A run: a line of the table and a point of the picture."""

    num_workers: int
    reducer: str
    policy: str
    gate: str
    round_secs: float
    waiting: float
    megabytes: float  # that a worker sends in a round
    throughput: float  # microbatches a second, of all workers
    gain: float  # over equal split without a gate

    @property
    def of_a_worker(self) -> float:
        """Microbatches a second, the mean worker."""
        return self.throughput / self.num_workers


def main() -> None:
    sizes = _numbers("workers", _WORKERS.value, int, "8,64")
    speeds = _numbers("speeds", _SPEEDS.value, float, "1,1,0.5")
    _check_names("policies", _POLICIES.value, list(quota.POLICIES))
    _check_names("gates", _GATES.value, list(gates.GATES))
    _check_names("reducers", _REDUCERS.value, list(topology.REDUCERS))
    _check_together(sizes)
    print(
        "| n | reducer | policy | gate | mean round (s) | waiting | MB sent a worker and round "
        "| microbatches/s | over blocking equal split |\n|---|---|---|---|---|---|---|---|---|"
    )
    began, lines = time.perf_counter(), []
    for num_workers, reducer in itertools.product(sizes, _REDUCERS.value):
        try:
            made = _made("reducer", reducer, graph=_GRAPH.value)
            blocking = _run(num_workers, speeds, made, "equal", "none", "all")
            for policy, gate in itertools.product(_POLICIES.value, _GATES.value):
                run = blocking
                if (policy, gate, _WAIT_FOR.value) != ("equal", "none", "all"):
                    run = _run(num_workers, speeds, made, policy, gate, _WAIT_FOR.value)
                lines.append(_line(num_workers, reducer, policy, gate, run, blocking))
                print(_text(lines[-1]), flush=True)
        except ValueError as error:
            sys.exit(f"{num_workers} workers with {reducer}: {error}")
    print(f"\n{time.perf_counter() - began:.0f} s for {len(lines)} runs", file=sys.stderr)
    if _PICTURE.value:
        path = pathlib.Path(_PICTURE.value).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(lines, path)
        except (OSError, ValueError) as error:  # also a suffix of no kind of picture
            sys.exit(f"--picture={path} cannot be written: {error}")


def _made(kind: str, name: str, **options: Any) -> Any:
    """The part of this name, with those of the options that it has."""
    factory = kinds.factory_of(kind, name)
    known = parts.options_of(factory)
    return factory(**{option: value for option, value in options.items() if option in known})


def _run(
    num_workers: int,
    speeds: list[float],
    reducer: topology.Reducer,
    policy: str,
    gate: str,
    wait_for: str,
) -> simulate.Simulation:
    mine = [speeds[worker % len(speeds)] for worker in range(num_workers)]
    secs = [_SECS.value / speed for speed in mine]
    cluster = emulate.EmulatedCluster(
        tuple(secs), delay=_DELAY.value, delay_per=_DELAY_PER.value, seed=_SEED.value
    )
    budget = num_workers * _MICROBATCHES.value
    mean_secs = _MICROBATCHES.value * sum(secs) / num_workers
    return simulate.simulate(
        _made("quota", policy, proportions=mine),
        cluster,
        budget=budget,
        num_rounds=_ROUNDS.value,
        caps=[_MOST.value] * num_workers if _MOST.value else None,
        gate=_made(
            "gate",
            gate,
            quorum=max(round(_QUORUM.value * budget), 1),
            deadline_secs=_DEADLINE.value * mean_secs,
        ),
        drop=_DROP.value,
        reducer=reducer,
        param_bytes=round(_MEGABYTES.value * 1e6),
        link=links.LinkModel(_LATENCY.value, _GIGABITS.value * 1e9 / 8),
        wait_for=wait_for,
    )


def _line(
    num_workers: int,
    reducer: str,
    policy: str,
    gate: str,
    run: simulate.Simulation,
    blocking: simulate.Simulation,
) -> Line:
    return Line(
        num_workers,
        reducer,
        policy,
        gate,
        round_secs=float(run.round_secs.mean()),
        waiting=float((run.waiting_fraction * run.local_secs).sum() / run.local_secs.sum()),
        megabytes=float(run.bytes_sent.mean()) / num_workers / 1e6,
        throughput=run.microbatches_per_sec,
        gain=run.microbatches_per_sec / blocking.microbatches_per_sec,
    )


def _text(line: Line) -> str:
    return (
        f"| {line.num_workers} | {line.reducer} | {line.policy} | {line.gate} "
        f"| {line.round_secs:.3f} | {line.waiting:.0%} | {line.megabytes:.2f} "
        f"| {line.throughput:.4g} | {line.gain:.2f} |"
    )


# --- Flags ---


def _numbers(flag: str, words: Sequence[str], kind: type, example: str) -> list:
    try:
        values = [kind(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not _is(kind, word))
        sys.exit(f"--{flag}: {wrong!r} is no number; give numbers such as --{flag}={example}")
    if not values or not all(0 < value < float("inf") for value in values):
        sys.exit(
            f"--{flag}={','.join(words)}: give one or more finite numbers above 0, such as "
            f"--{flag}={example}"
        )
    return values


def _is(kind: type, word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _check_names(flag: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        found = f"{wrong[0]!r} is not known" if wrong else "the list is empty"
        sys.exit(f"--{flag}: {found}; allowed are {', '.join(allowed)}")


def _check_together(sizes: list[int]) -> None:
    """Refuses at once what a run would refuse after those before it."""
    reducers = {name: topology.REDUCERS[name]() for name in _REDUCERS.value}
    for name, reducer in reducers.items():
        limit = reducer.most_workers
        if limit is not None and max(sizes) > limit:
            sys.exit(
                f"--reducers: {name} plans for at most {limit} workers; run it with, for example, "
                f"--workers=8,64,{limit}, or leave it out for {max(sizes)}"
            )
    if _WAIT_FOR.value == "all":
        return
    summing = [name for name, reducer in reducers.items() if not reducer.gossips]
    if summing:
        sys.exit(
            f"--wait_for=neighbours: {summing[0]} needs every worker; give reducers that gossip, "
            "such as --reducers=d_psgd"
        )
    global_gates = [name for name in _GATES.value if gates.GATES[name]().needs_news]
    if global_gates:
        sys.exit(
            f"--wait_for=neighbours: gate {global_gates[0]!r} needs news from every worker; give "
            "--gates=none,deadline"
        )


# --- The picture ---

_COLOURS = ("#1f6fb4", "#d4572a", "#2e8b57", "#8a5fb0", "#8c6d1f")
_STYLES = ((0, ()), (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # whole, dashes, dots, both
_MARKERS = ("o", "s", "^", "D", "v")
_PANELS = (
    ("mean round", "seconds", "round_secs"),
    ("waiting", "share of the time before the exchange", "waiting"),
    ("sent by a worker in a round", "MB", "megabytes"),
    ("throughput of a worker", "microbatches / s", "of_a_worker"),
)


def draw(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Each column against n: colours are policies, strokes gates, markers reducers."""
    from matplotlib import figure, ticker
    from matplotlib.lines import Line2D

    policies = dict(zip(dict.fromkeys(line.policy for line in lines), _COLOURS, strict=False))
    gates = dict(zip(dict.fromkeys(line.gate for line in lines), _STYLES, strict=False))
    reducers = dict(zip(dict.fromkeys(line.reducer for line in lines), _MARKERS, strict=False))
    sizes = sorted({line.num_workers for line in lines})
    page = figure.Figure(figsize=(10, 7.6), layout="constrained")
    axes = page.subplots(2, 2).ravel()
    for ax, (title, unit, field) in zip(axes, _PANELS, strict=True):
        curves: dict[tuple[str, str, str], list[Line]] = {}
        for line in lines:
            key = (line.reducer, line.policy, line.gate)
            if field == "megabytes":  # the reducer alone decides it
                key = (line.reducer, "", "")
            curves.setdefault(key, []).append(line)
        for (reducer, policy, gate), points in curves.items():
            points = sorted(points, key=lambda line: line.num_workers)
            ax.plot(
                [line.num_workers for line in points],
                [getattr(line, field) for line in points],
                color=policies.get(policy, "#444444"),
                linestyle=gates.get(gate, _STYLES[0]),
                marker=reducers[reducer],
                markersize=5,
                linewidth=1.5,
                alpha=0.9,
            )
        ax.set_xscale("log")
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        values = [getattr(line, field) for line in lines]
        if field == "waiting":
            ax.set_ylim(0, min(1.0, 1.15 * max(values) + 0.05))
            ax.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        elif min(values) > 0:
            _log_values(ax, min(values), max(values))
        ax.set_title(title, fontsize=11, loc="left")
        ax.set_ylabel(unit)
        ax.grid(alpha=0.25, which="both")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[2:]:
        ax.set_xlabel("workers")
    entries = [Line2D([], [], color=c, linewidth=3, label=name) for name, c in policies.items()]
    entries += [
        Line2D([], [], color="#444444", linestyle=s, label=f"gate {name}")
        for name, s in gates.items()
    ]
    entries += [
        Line2D([], [], color="#444444", linestyle="", marker=m, label=name)
        for name, m in reducers.items()
    ]
    page.legend(handles=entries, loc="outside lower center", ncols=min(len(entries), 6))
    page.savefig(path, dpi=130)


def _log_values(ax, least: float, most: float) -> None:
    """A logarithmic axis with plain numbers, and enough of them where it spans little."""
    from matplotlib import ticker

    ax.set_yscale("log")
    ax.set_ylim(least / 1.25, most * 1.25)
    few = most / least < 30
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if few else (1.0,)
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    ax.yaxis.set_minor_locator(ticker.NullLocator())
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))


if __name__ == "__main__":
    command_line.run(main)
