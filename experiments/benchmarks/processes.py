"""What do real processes at unequal CPU shares reach, against equal split and PyTorch DDP?

    python -m experiments.benchmarks.processes [--only=GROUP,…] [--data_dir=DIR]
        [--torch_python=PATH] [--repeats=2] [--before=DIR] [--runs=10]
        [--torchft_secs=240] [--torchft_out=FILE]

experiments/results/processes/README.md keeps the tables. Groups: alone, mlp, lenet,
quotas, torchft.
All train on CIFAR-10, which has to be in DIR. Every arm is a run of `hetjax.launch` of its own, so
that all are held to their shares in the same way, and arms take turns. torch may belong to another
interpreter.
With --before, a checkout of an earlier version, mlp
and lenet compare this one with it alone.
Nothing else may need the machine meanwhile: cores that are shared out in full have nothing left.
"""

import collections
import functools
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from absl import flags, logging

from experiments import command_line
from experiments.benchmarks import beside_torchft, launched_runs
from experiments.benchmarks import process_arms as arms_lib
from experiments.benchmarks.launched_runs import SHARES, TASKS
from experiments.benchmarks.rows import Found, Row, middle, print_tables
from hetjax import quota

# Other programs have flags of these names too, and tests import several of them.
_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.", allow_override=True)
_BEFORE = flags.DEFINE_string("before", None, "Checkout that mlp and lenet are compared with.")
_REPEATS = flags.DEFINE_integer("repeats", 2, "Runs of each arm.", 1)
_RUNS = flags.DEFINE_integer("runs", 10, "Of `quotas`.", 1)
_SECS = flags.DEFINE_float("torchft_secs", 240.0, "Of each run of `torchft`.", 60.0)
_OUT = flags.DEFINE_string("torchft_out", None, "Gets the runs of `torchft`, JSON.")

_ROOT = pathlib.Path(__file__).parents[2]
_QUOTA_ROUNDS = 70  # of a run of `quotas`


def _of_runs(
    name: str,
    arms: Sequence[launched_runs.Arm],
    field: str,
    form: str,
    unit: str = "",
) -> Row:
    return Row(name, "none", middle([getattr(arm, field) for arm in arms], form, unit), len(arms))


def _over(
    first: Sequence[launched_runs.Arm],
    second: Sequence[launched_runs.Arm],
    by: Sequence[float] | None = None,
) -> str:
    """Examples a second over those of others in the same turns; over `by`, too."""
    turns = zip(first, second, by or [1.0] * len(first), strict=True)
    return middle([a.examples_per_sec / b.examples_per_sec / own for a, b, own in turns])


def alone_rows() -> Iterator[Row | str]:
    """One core, no communication: what each side computes."""
    variants = arms_lib.DDP_VARIANTS | arms_lib.COMPILED if arms_lib.torch_version() else {}
    for name, task in TASKS.items():
        own = arms_lib.part_of(task)
        turns, slower = [], []
        for _ in range(_REPEATS.value):
            turns.append(arms_lib.alone(name, task, variants))
            speed = arms_lib.run_hetjax(own, "equal", 24, (min(SHARES),)).examples_per_sec
            slower.append(turns[-1]["hetjax"] / speed)
        for title in turns[0]:
            speeds = middle([turn[title] for turn in turns], ",.0f")
            yield Row(f"{name}, {title}: examples a second", "none", speeds, len(turns))
        yield Row(
            f"{name}: slower on {min(SHARES):g} of a core",
            f"{1 / min(SHARES):g}",
            middle(slower),
            len(slower),
        )
        yield f"{task.title}, a round of {own.batch} in microbatches of {own.microbatch_size}."
    yield "One process on one core." if variants else arms_lib.no_torch()


def checkout_rows(name: str, before: pathlib.Path) -> Iterator[Row | str]:
    """This checkout and an earlier one in turn, each policy."""
    if not (before / "hetjax" / "__init__.py").exists():
        sys.exit(f"--before: {before} is no checkout: it has no hetjax/__init__.py")
    task = TASKS[name]
    checkouts = {"this": _ROOT, "before": before.resolve()}
    for policy in ("adaptive", "equal"):
        arms: dict[str, list[launched_runs.Arm]] = {side: [] for side in checkouts}
        for turn in range(_REPEATS.value):
            for side in list(checkouts)[:: 1 if turn % 2 else -1]:  # neither is always the first
                num_rounds, checkout = task.rounds[policy], checkouts[side]
                arms[side].append(
                    arms_lib.run_hetjax(task, policy, num_rounds, SHARES, checkout=checkout)
                )
        for side in checkouts:
            what = f"{policy}, {side}: examples a second"
            yield _of_runs(what, arms[side], "examples_per_sec", ",.0f")
        reached = _over(arms["this"], arms["before"])
        yield Row(f"{policy}: this checkout over that before", "≥ 0.98", reached, _REPEATS.value)
    yield from _conditions(task)


def _conditions(
    task: launched_runs.Task, skipped: Mapping[str, int] = arms_lib.SKIPPED
) -> Iterator[str]:
    shares = " : ".join(f"{share:g}" for share in SHARES)
    yield f"{task.title} on CIFAR-10, {len(SHARES)} processes at shares {shares} of a core."
    yield f"{task.batch} examples a round, in microbatches of {task.microbatch_size}."
    first = ", ".join(f"{count} of {arm}" for arm, count in skipped.items())
    yield f"Medians of runs in turn. The first rounds are left out: {first}."


def task_rows(name: str) -> Iterator[Row | str]:
    """Adaptive quotas, equal split and DDP in turn, and each side's part alone on a core."""
    if _BEFORE.value:
        yield from checkout_rows(name, pathlib.Path(_BEFORE.value))
        return
    task, variants = TASKS[name], arms_lib.DDP_VARIANTS if arms_lib.torch_version() else {}
    arms: dict[str, list[launched_runs.Arm]] = {
        title: [] for title in ("adaptive", "equal", *variants)
    }
    alone: list[dict[str, float]] = []
    for _ in range(_REPEATS.value):
        for policy in ("adaptive", "equal"):
            arms[policy].append(arms_lib.run_hetjax(task, policy, task.rounds[policy], SHARES))
        for title, options in variants.items():
            arms[title].append(arms_lib.run_torch(name, task, task.rounds["ddp"], SHARES, options))
        if variants:
            alone.append(arms_lib.alone(name, task, variants))
    for title, own in arms.items():
        yield _of_runs(f"{title}: examples a second", own, "examples_per_sec", ",.0f")
    reached = _over(arms["adaptive"], arms["equal"])
    yield Row("adaptive over equal split", "≥ 1.88 (bound 2)", reached, _REPEATS.value)
    for policy in ("adaptive", "equal"):
        own = arms[policy]
        yield Row(f"{policy}: quotas", "none", " ".join(map(str, own[-1].quotas)))
        yield _of_runs(f"{policy}: a round", own, "round_secs", ".3f", " s")
        yield _of_runs(f"{policy}: waiting", own, "waiting", ".1%")
        yield _of_runs(f"{policy}: beside the longest local phase", own, "beside", ".1%")
        first = f"{policy}: examples a second at first"
        yield _of_runs(first, own, "first_examples_per_sec", ",.0f")
    yield from _conditions(task)
    yield from _torch_rows(arms, alone)


def _torch_rows(
    arms: Mapping[str, Sequence[launched_runs.Arm]], alone: Sequence[Mapping[str, float]]
) -> Iterator[Row | str]:
    """Each policy over DDP, beside the ratio of what both sides compute alone on a core."""
    if not alone:
        yield arms_lib.no_torch()
        return
    fastest = {
        title: statistics.median(arm.examples_per_sec for arm in arms[title])
        for title in arms_lib.DDP_VARIANTS
    }
    best = max(fastest, key=lambda title: fastest[title])
    kernels = [speeds["hetjax"] / max(speeds[t] for t in arms_lib.DDP_VARIANTS) for speeds in alone]
    yield Row("kernels: hetjax over torch, one core", "none", middle(kernels), len(kernels))
    for policy, target in (("adaptive", 1.8), ("equal", 0.97)):
        own = arms[policy]
        yield Row(f"{policy} over DDP", "none", _over(own, arms[best]), len(own))
        reached = _over(own, arms[best], kernels)
        yield Row(f"{policy} over DDP, of kernels", f"≥ {target}", reached, len(own))
    yield f"DDP: PyTorch {arms_lib.torch_version()}, Gloo, equal batches; the faster one, {best}."
    yield "The tuned DDP has bucket views, a static graph and a fused optimiser."
    yield "Of kernels: over what both sides compute alone on one core."


def steps_rows() -> Iterator[Row | str]:
    """Local steps, 16 of each worker in the mean: as many as its speed allows, and equally many."""
    outer = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
    inner = {"name": "adamw", "learning_rate": 4e-4}
    rule = {"name": "local_steps", "arguments": {"inner": inner}}
    task = TASKS["mlp"]._replace(
        microbatch_size=384, budget=16 * len(SHARES), more={"rule": rule, "optimizer": outer}
    )
    rounds, skipped = {"adaptive": 18, "equal": 7}, {"adaptive": 9, "equal": 2}
    arms: dict[str, list[launched_runs.Arm]] = {policy: [] for policy in rounds}
    for _ in range(_REPEATS.value):
        for policy, count in rounds.items():
            lines = launched_runs.run_lines(task, policy, count, SHARES, arms_lib.DATA_DIR.value)
            arms[policy].append(launched_runs.of_lines(lines, skipped[policy]))
    for policy, own in arms.items():
        yield _of_runs(f"{policy} steps: examples a second", own, "examples_per_sec", ",.0f")
        yield Row(f"{policy} steps: quotas", "none", " ".join(map(str, own[-1].quotas)))
        of_all = _of_runs(f"{policy} steps: beside the longest local phase", own, "beside", ".1%")
        yield of_all._replace(target="≤ 3%" if policy == "adaptive" else "none")
    reached = _over(arms["adaptive"], arms["equal"])
    yield Row("adaptive over equal steps", "≥ 1.9 (bound 2)", reached, _REPEATS.value)
    yield from _conditions(task, skipped)


def quotas_rows() -> Iterator[Row | str]:
    """Where the quotas of the MLP settle, run after run."""
    task, found = TASKS["mlp"], []
    costs = quota.WorkerCosts(0.0, 1.0 / np.array(SHARES))
    best = tuple(quota.solve_quotas(costs, task.budget).tolist())
    for _ in range(_RUNS.value):
        lines = launched_runs.run_lines(
            task, "adaptive", _QUOTA_ROUNDS, SHARES, arms_lib.DATA_DIR.value
        )
        found.append(launched_runs.of_lines(lines, arms_lib.SKIPPED["adaptive"]).quotas)
    reached = f"{found.count(best)} of {len(found)}"
    yield Row(f"runs that went to {' '.join(map(str, best))}", "9 of 10", reached, len(found))
    counts = collections.Counter(found).most_common()
    texts = [f"{' '.join(map(str, own))}: {count}" for own, count in counts]
    yield f"Quotas of most rounds from {arms_lib.SKIPPED['adaptive']} on: {'; '.join(texts)}."
    yield from _conditions(task)


GROUPS: dict[str, Callable[[], Found]] = {
    "alone": alone_rows,
    "mlp": functools.partial(task_rows, "mlp"),
    "lenet": functools.partial(task_rows, "lenet"),
    "steps": steps_rows,
    "quotas": quotas_rows,
    "torchft": lambda: beside_torchft.survival_rows(_SECS.value, _OUT.value),
}


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    if os.getloadavg()[0] > 0.5:
        load = os.getloadavg()[0]
        print(f"The machine is not idle (load {load:.1f}): figures may be void.", file=sys.stderr)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
