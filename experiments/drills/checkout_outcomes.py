"""What a run of `checkout_worker` left behind, and where two of them differ.

Names of arrays in a checkpoint change from version to version, so each is found by parts of its
path that say what it is. Where a version has another form for the same thing (what is left of a
pass as an array, or as a queue with a head), both are brought to one form.
"""

import collections
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

IDENTICAL, BITS = ("rounds", "orders", "queues", "ledger", "counts"), ("numbers", "arrays")
LEVELS = ("upper", "lower")
TOLERANCE = 1e-12
"""Of float64, relative to the largest entry of an array."""

_EXACT = (
    "round",
    "epoch",
    "examples",
    "examples_processed",
    "skipped_examples",
    "quotas",
    "microbatches_done",
    "examples_counted",
    "present",
    "full",
    "bytes_sent",
    "step",
    "level",
    "request",
    "is_new",
    "rounds",
    "revisits",
)
_NUMBERS = (
    "loss",
    "eval",
    "consensus",
    "metrics",
    "learning_rate",
    "grad_norm",
    "update_norm",
    "weight_sum",
    "upper_loss",
    "lower_loss",
    "hypergradient_norm",
    "gap",
    "residual",
    "multiplier",
    "step_chosen",
    "curvature",
    "crossed",
    "stood",
)
_VIRTUAL_NUMBERS = (
    "compute_secs",
    "local_secs",
    "round_secs",
    "optimal_round_secs",
    "waiting_fraction",
    "step_secs",
    "kinds",
)
_PARTS = {
    "best_params": "best_params",
    "opt_state": "opt_state",
    "running_sum": "memory",
    "memory": "memory",
    "params": "params",
    "progress_rounds": "progress",
}
_OF_STEPS = ("x", "opt", "kept", "train/params", "best_params")  # of a bilevel checkpoint
_LEDGER = {  # what each version calls it
    "counts": "counts",
    "ever": "ever",
    "missing": "missing",
    "closed_missing": "missing",
    "duplicated": "duplicated",
    "closed_duplicated": "duplicated",
}
_COUNTS = (
    "rounds",
    "outer_steps",
    "levels",
    "interrupted",
    "stopped_by",
    "resumed",
    "judged_by",
    "rounds_without_update",
    "examples_skipped",
    "bytes_sent",
    "examples_missing",
    "examples_duplicated",
    "examples_never_processed",
    "clock",
)


class Outcome(NamedTuple):
    """A run, in parts that are compared one by one."""

    rounds: list[dict[str, Any]]
    """What has to be identical of each round."""
    orders: list[list[np.ndarray]]
    """Of each checkpoint: order, and examples and signs placed in this pass, of each pass."""
    queues: list[list[np.ndarray]]
    """Of each checkpoint: example ids still to come, of each pass."""
    ledger: list[list[np.ndarray]]
    counts: dict[str, Any]
    numbers: list[dict[str, Any]]
    """Losses and virtual seconds of each round, to 9 digits; metrics of the summary."""
    arrays: dict[str, list[np.ndarray]]
    """Parameters and optimiser state of each checkpoint, and what the task returned."""


def read(directory: pathlib.Path) -> Outcome:
    """Reads the outcome of one arm.

    Raises:
        ValueError: it has none, or its checkpoints lack what is to be compared; says which.
    """
    if not (directory / "result.npz").exists():
        error = directory / "error.txt"
        raise ValueError(error.read_text() if error.exists() else "the process ended before it")
    told = json.loads((directory / "told.json").read_text())
    with np.load(directory / "result.npz") as result:
        returned = {name: [result[name]] for name in sorted(result.files)}
    outcome = Outcome([], [], [], [], dict(told.get("counts", {})), [], returned)
    _add_lines(outcome, told.get("rounds", []), is_virtual=told.get("is_virtual", False))
    run = directory / "run"
    if run.exists():
        _add_run(outcome, run)
    return outcome


def _add_run(outcome: Outcome, run: pathlib.Path) -> None:
    """Adds what a run left in its workdir."""
    summary = json.loads((run / "summary.json").read_text())
    for name in ("metrics.jsonl", *(f"{level}_rounds.jsonl" for level in LEVELS)):
        if (run / name).exists():
            lines = [json.loads(text) for text in (run / name).read_text().splitlines()]
            _add_lines(outcome, lines, is_virtual=summary.get("clock") == "virtual")
    outcome.counts.update(_taken(summary, _COUNTS))
    if "resumed" in outcome.counts:  # when it was is another time
        outcome.counts["resumed"] = [each["round"] for each in summary["resumed"]]
    metrics = ("best_", "val_", "test_", "train_loss", "train_accuracy")
    outcome.numbers.append({n: summary[n] for n in summary if n.startswith(metrics)})
    for step in sorted(p for p in (run / "checkpoints").iterdir() if p.name.isdigit()):
        arrays, index = _read_arrays(step), int(step.name)
        if "outer_steps" in summary:
            add_bilevel_checkpoint(outcome, index, arrays)
        else:
            add_checkpoint(outcome, index, arrays)


def _add_lines(outcome: Outcome, lines: list[dict[str, Any]], *, is_virtual: bool) -> None:
    names = _NUMBERS + (_VIRTUAL_NUMBERS if is_virtual else ())
    outcome.rounds.extend(_taken(line, _EXACT) for line in lines)
    outcome.numbers.extend(_taken(line, names) for line in lines)


def _taken(line: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: line[name] for name in names if name in line}


def _read_arrays(step: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, those without elements too."""
    from hetjax.checkpoints import files  # with JAX

    index = json.loads((step / "about.json").read_text())["arrays"]
    empty = {n: np.zeros(shape, dtype) for n, (dtype, shape) in index.items() if 0 in shape}
    return files.read_arrays(step / files.ARRAYS) | empty


def add_bilevel_checkpoint(outcome: Outcome, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Adds both levels' streams, and what the outer steps know; raises ValueError as the other."""
    for level in LEVELS:
        own = {n.removeprefix(f"{level}/"): a for n, a in arrays.items() if n.startswith(level)}
        add_checkpoint(outcome, step, own, needs=())
        outcome.ledger[-1].append(own["revisits"])
    for name in sorted(arrays):
        part = next((p for p in _OF_STEPS if f"{name}/".startswith(f"{p}/")), None)
        if part is not None:
            outcome.arrays.setdefault(f"{part} of {step}", []).append(arrays[name])
    if f"train/params of {step}" not in outcome.arrays:
        raise ValueError(f"checkpoint {step} has no params arrays: {sorted(arrays)}")


def add_checkpoint(
    outcome: Outcome,
    step: int,
    arrays: Mapping[str, np.ndarray],
    *,
    needs: Sequence[str] = ("params", "opt_state"),
) -> None:
    """Adds what is compared of one checkpoint.

    Raises:
        ValueError: it lacks an order, what is left of one, a ledger, or arrays of `needs`.
    """
    passes: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    kept: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    ledger = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        path = "/".join(parents)
        if last in _LEDGER or last == "reached":
            ledger[_LEDGER.get(last, last)] = array
        elif last in ("order", "realised", "signs", "num_placed", "pass_index"):
            passes[path.removesuffix("/state").removesuffix("/order_state")].setdefault(last, array)
        elif last in ("remaining", "queue", "head"):
            passes[path][last] = array
        path_parts = name.split("/")
        places = [place for place, part in enumerate(path_parts) if part in _PARTS]
        if places:  # the outermost says whose the rest is
            own = "/".join(path_parts[places[0] + 1 :])
            kept[_PARTS[path_parts[places[0]]]][own] = array
    found = [fields for fields in passes.values() if "order" in fields]
    if "reached" in ledger:  # in finished passes; the other form has those of the open one too
        ledger["ever"] = ledger.pop("reached") | (ledger["counts"] > 0)
    lacks = [what for what, there in (("orders", found), ("ledger", ledger)) if not there]
    lacks += [f"{what} arrays" for what in needs if what not in kept]
    lacks += ["queues"] * any("remaining" not in f and "queue" not in f for f in found)
    if lacks:
        raise ValueError(f"checkpoint {step} has no {', '.join(lacks)}: {sorted(arrays)}")
    outcome.orders.append([array for fields in found for array in _order(fields)])
    outcome.queues.append([_left(fields) for fields in found])
    outcome.ledger.append([ledger[name] for name in sorted(ledger)])
    for part, named in kept.items():
        if needs:
            outcome.arrays[f"{part} of {step}"] = [named[name] for name in sorted(named)]


def _order(fields: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The order; with signs also the examples that are placed of this pass, and their signs."""
    if "signs" not in fields:
        return [fields["order"]]
    count = int(fields["num_placed"])
    return [fields["order"], fields["realised"][:count], fields["signs"][:count]]


def _left(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    if "remaining" in fields:
        return fields["remaining"]
    return fields["queue"][int(fields["head"]) :]


def differences(before: Outcome, after: Outcome) -> list[str]:
    """Names the parts that are not the same to the bit, each with the first place."""
    found = []
    for name in IDENTICAL + BITS:
        first, second = getattr(before, name), getattr(after, name)
        if not _same(first, second):
            found.append(f"{name}{_place(first, second)}")
    return found


def largest_gap(before: Outcome, after: Outcome) -> float:
    """The largest difference of an array, relative to its largest entry; inf: other shapes."""
    gaps = [0.0]
    for name in sorted(before.arrays.keys() | after.arrays.keys()):
        first, second = before.arrays.get(name, []), after.arrays.get(name, [])
        if [a.shape for a in first] != [a.shape for a in second]:
            return np.inf
        for a, b in zip(first, second, strict=True):
            if a.size:
                gap = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
                gaps.append(float(gap / max(np.abs(a).max(), np.finfo(np.float64).tiny)))
    return max(gaps)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray | dict | list) and type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.tobytes() == second.tobytes()
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[n], second[n]) for n in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


def _place(first: Any, second: Any) -> str:
    """Where two values differ first, as `[3][0]`."""
    if type(first) is not type(second):
        return ""
    if isinstance(first, dict):
        for name in sorted(first.keys() ^ second.keys()):
            return f"[{name}] on one side alone"
        pairs: Iterable[tuple[Any, Any]] = [(name, name) for name in first]
    elif isinstance(first, list):
        if len(first) != len(second):
            return f", {len(first)} and {len(second)} of them"
        pairs = enumerate(range(len(first)))
    else:
        return ""
    for name, _ in pairs:
        if not _same(first[name], second[name]):
            return f"[{name}]{_place(first[name], second[name])}"
    return ""
