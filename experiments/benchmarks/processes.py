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
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import app, flags, logging

from experiments import command_line
from experiments.benchmarks import beside_torchft, launched_runs
from experiments.benchmarks import process_arms as arms_lib
from experiments.benchmarks.launched_runs import SHARES, TASKS
from experiments.benchmarks.rows import Row, print_tables
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


def alone_rows() -> list[Row]:
    """One core, no communication: what each side computes."""
    rows = []
    for name in TASKS:
        task, variants = TASKS[name], {}
        if arms_lib.torch_version():
            variants = arms_lib.DDP_VARIANTS | arms_lib.COMPILED
        own = arms_lib.part_of(task)
        turns, slower = [], []
        for _ in range(_REPEATS.value):
            turns.append(arms_lib.alone(name, task, variants))
            speed = arms_lib.run_hetjax(own, "equal", 24, (min(SHARES),)).examples_per_sec
            slower.append(turns[-1]["hetjax"] / speed)
        texts = [
            f"{title} {launched_runs.middle([speeds[title] for speeds in turns], ',.0f')}"
            for title in turns[0]
        ]
        where = f"{task.title}, {own.batch} examples a round (hetjax in microbatches of "
        where += f"{own.microbatch_size}), one process"
        speeds_text = "; ".join(texts if variants else [*texts, arms_lib.no_torch()])
        rows += [
            Row(f"{where} on one core: examples a second of hetjax, PyTorch", "none", speeds_text),
            Row(
                f"{where}: times as long on {min(SHARES):g} of a core as on a whole one",
                f"{1 / min(SHARES):g}",
                launched_runs.middle(slower),
            ),
        ]
    return rows


def checkout_rows(name: str, before: pathlib.Path) -> list[Row]:
    """This checkout and an earlier one in turn, each policy."""
    if not (before / "hetjax" / "__init__.py").exists():
        sys.exit(f"--before: {before} is no checkout: it has no hetjax/__init__.py")
    task, rows = TASKS[name], []
    checkouts = {"this": _ROOT, "before": before.resolve()}
    for policy in ("adaptive", "equal"):
        arms: dict[str, list[launched_runs.Arm]] = {side: [] for side in checkouts}
        for turn in range(_REPEATS.value):
            for side in list(checkouts)[:: 1 if turn % 2 else -1]:  # neither is always the first
                num_rounds, checkout = task.rounds[policy], checkouts[side]
                arms[side].append(
                    arms_lib.run_hetjax(task, policy, num_rounds, SHARES, checkout=checkout)
                )
        rows.append(
            Row(
                f"{task.title}, CIFAR-10, 4 processes at shares "
                f"{' : '.join(f'{share:g}' for share in SHARES)}, {task.batch} examples a round, "
                f"policy {policy}: examples a second over those of the checkout before, medians "
                f"of {_REPEATS.value} runs in turn without the first "
                f"{arms_lib.SKIPPED[policy]} rounds",
                "≥ 0.98",
                _ratio(arms["this"], arms["before"]),
            )
        )
    return rows


def task_rows(name: str) -> list[Row]:
    """Adaptive quotas, equal split and DDP in turn, and each side's part alone on a core."""
    if _BEFORE.value:
        return checkout_rows(name, pathlib.Path(_BEFORE.value))
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
    rows = [
        Row(
            f"{task.title}, CIFAR-10, 4 processes at shares "
            f"{' : '.join(f'{share:g}' for share in SHARES)}, {task.batch} examples a round "
            f"(microbatches of {task.microbatch_size}): examples a second, adaptive quotas over "
            f"equal split, medians of {_REPEATS.value} runs in turn without the first "
            f"{arms_lib.SKIPPED['adaptive']} and {arms_lib.SKIPPED['equal']} rounds",
            "≥ 1.88 (bound 2)",
            _ratio(arms["adaptive"], arms["equal"]),
        ),
        Row(
            "the same: seconds of a round; waiting; share of the round beside its longest local "
            "phase; quotas reached; examples a second of the first rounds",
            "none",
            "; ".join(_details(policy, arms[policy]) for policy in ("adaptive", "equal")),
        ),
    ]
    return [*rows, *_torch_rows(arms, alone)]


def _torch_rows(
    arms: Mapping[str, Sequence[launched_runs.Arm]], alone: Sequence[Mapping[str, float]]
) -> list[Row]:
    """Each policy over DDP, beside the ratio of what both sides compute alone on a core."""
    figure = f"the same over PyTorch {arms_lib.torch_version() or ''} DDP with Gloo, a quarter of "
    figure += f"the batch each, without the first {arms_lib.SKIPPED['ddp']} steps"
    if not alone:
        return [Row(figure, "none", arms_lib.no_torch())]
    fastest = {
        title: statistics.median(arm.examples_per_sec for arm in arms[title])
        for title in arms_lib.DDP_VARIANTS
    }
    best = max(fastest, key=lambda title: fastest[title])
    kernels = [speeds["hetjax"] / max(speeds[t] for t in arms_lib.DDP_VARIANTS) for speeds in alone]
    rows = [
        Row(
            "the same: kernels, torch's seconds over hetjax's for a worker's part on one core",
            "none",
            launched_runs.middle(kernels),
        )
    ]
    for policy, target in (("adaptive", 1.8), ("equal", 0.97)):
        pairs = zip(arms[policy], arms[best], kernels, strict=True)
        of_kernels = [a.examples_per_sec / b.examples_per_sec / own for a, b, own in pairs]
        reached = (
            f"{launched_runs.middle(of_kernels)} of kernels; {_ratio(arms[policy], arms[best])}"
        )
        rows.append(
            Row(f"{figure}: {policy} quotas", f"≥ {target} of kernels", f"{reached} ({best})")
        )
    return rows


def _ratio(first: Sequence[launched_runs.Arm], second: Sequence[launched_runs.Arm]) -> str:
    pairs = zip(first, second, strict=True)
    ratio = launched_runs.middle([a.examples_per_sec / b.examples_per_sec for a, b in pairs])
    speeds = [
        launched_runs.middle([arm.examples_per_sec for arm in arms], ",.0f")
        for arms in (first, second)
    ]
    return f"{ratio}: {speeds[0]} over {speeds[1]}"


def _details(policy: str, arms: Sequence[launched_runs.Arm]) -> str:
    parts = [
        launched_runs.middle([arm.round_secs for arm in arms], ".3f"),
        launched_runs.middle([arm.waiting for arm in arms], ".1%"),
        launched_runs.middle([arm.beside for arm in arms], ".1%"),
        " ".join(map(str, arms[-1].quotas)),
        launched_runs.middle([arm.first_examples_per_sec for arm in arms], ",.0f"),
    ]
    return f"{policy} {', '.join(parts)}"


def quotas_rows() -> list[Row]:
    """Where the quotas of the MLP settle, run after run."""
    task, found = TASKS["mlp"], []
    costs = quota.WorkerCosts(0.0, 1.0 / np.array(SHARES))
    best = tuple(quota.solve_quotas(costs, task.budget).tolist())
    for _ in range(_RUNS.value):
        lines = launched_runs.run_lines(
            task, "adaptive", _QUOTA_ROUNDS, SHARES, arms_lib.DATA_DIR.value
        )
        found.append(launched_runs.of_lines(lines, arms_lib.SKIPPED["adaptive"]).quotas)
    counts = collections.Counter(found)
    texts = [f"{' '.join(map(str, own))}: {count}" for own, count in counts.most_common()]
    return [
        Row(
            f"{task.title}, 4 processes at shares {' : '.join(f'{share:g}' for share in SHARES)}, "
            f"{task.budget} microbatches of {task.microbatch_size}: runs that went to "
            f"{' '.join(map(str, best))}, in most of their rounds "
            f"{arms_lib.SKIPPED['adaptive']} to {_QUOTA_ROUNDS}",
            "9 of 10",
            f"{counts[best]} of {len(found)} ({'; '.join(texts)})",
        )
    ]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "alone": alone_rows,
    "mlp": functools.partial(task_rows, "mlp"),
    "lenet": functools.partial(task_rows, "lenet"),
    "quotas": quotas_rows,
    "torchft": lambda: beside_torchft.survival_rows(_SECS.value, _OUT.value),
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments are taken, but {argv[1:]} were given.")
    logging.set_verbosity(logging.WARNING)
    if os.getloadavg()[0] > 0.5:
        load = os.getloadavg()[0]
        print(f"The machine is not idle (load {load:.1f}): figures may be void.", file=sys.stderr)
    print_tables(GROUPS, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
