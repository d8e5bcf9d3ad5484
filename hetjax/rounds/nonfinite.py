"""Which operation made the first number that is not finite? A microbatch, done once more, tells.

It is repeated eagerly, at the parameters and the state of its round, which was not updated. JAX
looks at the result of each operation then. What it finds first may be an infinity that is meant,
such as a mask's; so the first NaN is told, too, where it comes from elsewhere.
"""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import debugging, stateful, types
from hetjax import mesh as mesh_lib
from hetjax.processes import board as board_lib
from hetjax.rounds import run_state, setup

MOST_IDS = 10  # that a message shows
_PATIENCE_SECS = 60.0
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "hetjax")
_HANDED_ON = {  # of operations that only hand on an infinity that was written down
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "pad", "reshape"),
    *("select_n", "squeeze", "transpose"),
}


class Guilty(NamedTuple):
    """A microbatch that was not finite."""

    worker: int
    position: int  # in its round
    ids: list[int]


def shown(ids: list[int]) -> str:
    """The first few of them."""
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return f"{ids[:MOST_IDS]}{more}"


def guilty_of(parts: setup.RunParts, plan: run_state.Plan, positions: np.ndarray) -> Guilty:
    """The first of this process's workers, or else of all.

    Args:
        parts: of the run.
        plan: of the round.
        positions: i32[W]; -1: all of the worker's were finite. One is not.
    """
    bad = np.flatnonzero(positions >= 0).tolist()
    worker = next((w for w in bad if w in parts.workers), bad[0])
    position = int(positions[worker])
    ids = plan.assigned.microbatches(worker)[position]
    return Guilty(worker, position, ids[ids >= 0].tolist())


def told(parts: setup.RunParts, plan: run_state.Plan, state: Any, guilty: Guilty) -> str:
    """What the first operation was, a sentence; the worker's own process finds it for all.

    Args:
        parts: of the run.
        plan: of the round.
        state: of all workers, leaves `[W, ...]`, when the round began; None: nobody knows it.
        guilty: the microbatch.
    """
    of_all = None if parts.gather is None else board_lib.Board("nonfinite")
    if guilty.worker in parts.workers:
        text = _told(parts, plan, state, guilty)
        if of_all is not None:
            of_all.post(str(guilty.worker), text)
        return text
    assert of_all is not None
    process = int(parts.meeting.process_of[guilty.worker])
    try:
        return of_all.wait(
            str(guilty.worker), _PATIENCE_SECS, what="repeat a microbatch", by=process
        )
    except TimeoutError:
        return f"Process {process} can tell by which operation."


def _told(parts: setup.RunParts, plan: run_state.Plan, state: Any, guilty: Guilty) -> str:
    if not isinstance(state, types.TrainState):
        return ""
    own = parts.workers.index(guilty.worker)
    of_worker = state.params, state.worker, state.model_state
    if parts.mesh is None:
        row = mesh_lib.sliced_rows(of_worker, len(parts.workers))[own]
    else:
        row = mesh_lib.worker_rows(of_worker)[own]
    params, kept, model_state = jax.tree.map(lambda leaf: leaf[0], row)
    if found := _not_finite(params):
        return f"The parameters {found} were not finite before: the update before made them so."
    shared = types.Shared(params, plan.given, model_state=model_state)
    rng = jax.random.fold_in(parts.rng, int(plan.assigned.passes[guilty.worker]))
    rows, rule = plan.assigned.microbatches(guilty.worker), plan.programs.rule
    try:
        last = parts.feed.load(guilty.worker, rows[guilty.position])
        if found := _not_finite(last.examples):
            return f"The examples themselves are not finite: {found}."
        worker, sums = rule.begin(shared, kept if rule.keeps_worker else rule.init(params))
        if rule.losses is None:  # what it adds may depend on the microbatches before
            for ids in rows[: guilty.position]:
                microbatch = parts.feed.load(guilty.worker, ids)
                worker, sums = rule.add(shared, worker, sums, microbatch, rng)
    except Exception as error:
        return f"It could not be repeated: {type(error).__name__}: {error}."
    return _first_of(functools.partial(rule.add, shared, worker, sums, last, rng))


def _not_finite(tree: types.PyTree) -> str:
    """The first leaf that is not, by name."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if np.issubdtype(leaf.dtype, np.inexact) and not np.isfinite(np.asarray(leaf)).all():
            return repr(stateful.path_of(path))
    return ""


def _first_of(repeat: Callable[[], Any]) -> str:
    """Of a microbatch, repeated, the first operation whose result is infinite, or NaN."""
    either, nan = (_raised(repeat, infs=infs) for infs in (True, False))
    if nan is not None and (either is None or either.operation in _HANDED_ON):
        either = nan
    if either is None:
        return "Repeated by itself it is finite."
    text = f"The first number that is not finite, {either.told}."
    if nan is not None and nan != either:
        text += f" The first NaN, {nan.told}."
    return text


class _Found(NamedTuple):
    operation: str
    told: str


def _raised(repeat: Callable[[], Any], *, infs: bool) -> _Found | None:
    with debugging.eager(True), jax.debug_nans(True), jax.debug_infs(infs):
        try:
            repeat()
        except FloatingPointError as error:
            return _found(error)
        except Exception as error:
            return _Found("", f"was not found: repeated, it raised {type(error).__name__}: {error}")
    return None


def _found(error: FloatingPointError) -> _Found | None:
    """The operation, and the line of the user's that asked for it; None where none did."""
    match = re.search(r"\((\w+)\) encountered in (?:jit\()?(\w+)", str(error))
    kind, operation = match.groups() if match else ("", "an operation")
    cause = error.__cause__  # of a derivative: where JAX was asked for what it is of
    for raised, derivative in ((cause, " the derivative of"), (error, "")):
        frames = traceback.extract_tb(raised.__traceback__) if raised is not None else []
        for frame in reversed(frames):
            if not _is_of_a_library(frame.filename):
                place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
                line = f": {frame.line}" if frame.line else ""
                return _Found(
                    operation, f"{kind}, is made by {operation} in{derivative} {place}{line}"
                )
    return None


def _is_of_a_library(filename: str) -> bool:
    """Whether a file is of what hetjax stands on, or of hetjax but for its models."""
    if not os.path.exists(filename):  # as of a notebook's cell
        return False
    loaded = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    homes = [os.path.dirname(module.__file__) for module in loaded if module.__file__]
    zoo = os.path.join(homes[-1], "zoo")
    return any(filename.startswith(f"{home}{os.sep}") for home in homes) and not (
        filename.startswith(f"{zoo}{os.sep}")
    )
