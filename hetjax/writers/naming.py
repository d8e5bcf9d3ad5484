"""How are the numbers of a line called? As users of trackers look for them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_WORKERS = 64
"""Above it only the least and the largest quota are written, not the numbers of each worker."""

_OF_TRAINING = {
    *("loss", "learning_rate", "grad_norm", "update_norm"),
    *("upper_loss", "lower_loss", "hypergradient_norm", "gap", "residual", "multiplier"),
    *("step_chosen", "curvature"),
}
_OF_A_WORKER = {
    "quotas": "quota",
    "microbatches_done": "microbatches",
    "examples_counted": "examples",
    "compute_secs": "compute_secs",
    "host_secs": "host_secs",
}
_NO_NUMBERS = ("round", "step", "present", "full")


def scalars(line: Mapping[str, Any], sets: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of a line, by their names in a tracker.

    `train/…` is of training; `eval/…` of the evaluated set, or of several `NAME/…` of each;
    `workers/J/…` of a worker; `round/…`, or of a bilevel problem `step/…`, all others.

    Args:
        line: as `metrics.jsonl` has it.
        sets: names of the evaluated sets.

    Returns:
        name to number; NaN where the line says that a number was not finite.

    Example:
        >>> line = {"round": 3, "loss": 0.5, "eval": {"test_loss": None}, "quotas": [2, 1]}
        >>> scalars(line, ["test"])
        {'train/loss': 0.5, 'eval/loss': nan, 'workers/0/quota': 2, 'workers/1/quota': 1}
    """
    return dict(_named(line, sets))


def _named(line: Mapping[str, Any], sets: Sequence[str]) -> Iterator[tuple[str, float]]:
    rest = "step" if "step" in line else "round"
    for name, value in line.items():
        if name == "eval":
            for of_set, number in value.items():
                yield _of_set(of_set, sets), _number(number)
        elif name == "kinds":
            yield from _of_kinds(value)
        elif name in _OF_A_WORKER:
            yield from _of_workers(_OF_A_WORKER[name], value)
        elif isinstance(value, Mapping):
            group = "train" if name == "metrics" else name
            yield from ((f"{group}/{key}", _number(number)) for key, number in value.items())
        elif name not in _NO_NUMBERS and not isinstance(value, bool | str | list | tuple):
            prefix = "train" if name in _OF_TRAINING else rest
            yield f"{prefix}/{name}", _number(value)
    if "compute_secs" in line and "local_secs" in line:
        yield from _waiting(line)


def _number(value: Any) -> float:
    """NaN for what is not finite, which a line has as None."""
    return math.nan if value is None else value


def _of_set(name: str, sets: Sequence[str]) -> str:
    """`test_loss` as `eval/loss`, or as `test/loss` where several sets are evaluated."""
    worst, found = ("worst_", name[6:]) if name.startswith("worst_") else ("", name)
    own = max((s for s in sets if found.startswith(f"{s}_")), key=len, default="")
    if not own:
        return f"eval/{name}"
    metric = worst + found[len(own) + 1 :]
    return f"{own}/{metric}" if len(sets) > 1 else f"eval/{metric}"


def _of_workers(name: str, values: Sequence[Any]) -> Iterator[tuple[str, float]]:
    if len(values) <= MOST_WORKERS:
        yield from ((f"workers/{j}/{name}", _number(value)) for j, value in enumerate(values))
    elif name == "quota":
        yield from (("workers/least_quota", min(values)), ("workers/largest_quota", max(values)))


def _waiting(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What part of the local phase each worker waited that is present."""
    host = line.get("host_secs") or [0.0] * len(line["compute_secs"])
    busy = [a + b for a, b in zip(line["compute_secs"], host, strict=True)]
    longest = max(line["local_secs"], *busy)
    present = line.get("present") or [True] * len(busy)
    if longest > 0 and len(busy) <= MOST_WORKERS:
        for j, (secs, is_here) in enumerate(zip(busy, present, strict=True)):
            if is_here:
                yield f"workers/{j}/waiting", 1 - secs / longest


def _of_kinds(kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of each kind of round of a bilevel problem its numbers and its last quotas."""
    for title, of_kind in kinds.items():
        kind = re.sub(r"\W+", "_", title)
        for name, value in of_kind.items():
            if name == "quotas":
                yield from ((f"{kind}/{key}", x) for key, x in _of_workers("quota", value))
            else:
                yield f"{kind}/{name}", _number(value)
