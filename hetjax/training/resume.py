"""What of a run is saved between two rounds, and how a run goes on from it.

A checkpoint holds all that the rounds to come depend on: one copy of what the workers have in
common, a row for each worker of what they have not, the orders, the ledger and the quota policy's
state. With another number of workers the examples, the orders and the parameters stay as they
were; speeds are learnt anew, and replicas that differed begin at their mean.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.cluster import processes
from hetjax.training import checkpoint, leaves, record, run_records, setup, solutions
from hetjax.training import state as state_lib

DIRECTORY = "checkpoints"  # in the workdir
_OF_EACH_WORKER = ("memory", "worker")  # of `TrainState`: what workers may have each for itself


@dataclasses.dataclass
class Start:
    """Where a run begins: at its beginning, or at a checkpoint."""

    saved: checkpoint.Saved | None = None
    lines: list[record.RoundReport] = dataclasses.field(default_factory=list)
    examples_recomputed: int = 0
    """Done after the checkpoint and before the run ended; not committed, and done again."""


def find(
    workdir: pathlib.Path | None,
    config: dict[str, Any],
    *,
    parts: setup.RunParts,
    resume: bool,
    restarted: bool,
) -> Start:
    """Decides where the run begins; process 0 does, and all others follow it.

    Args:
        workdir: of the run; None: nothing is kept.
        config: as recorded.
        parts: of the run.
        resume: go on from the newest checkpoint.
        restarted: a supervisor has started the run again, so that even one that is finished is
            gone on from.

    Raises:
        ValueError: the directory is another configuration's, or cannot be used.
    """
    if workdir is None:
        return Start()
    directory = workdir / DIRECTORY
    board = None if parts.meeting.alone else processes.Board("resume")
    if not parts.leads:
        assert board is not None
        step = board.wait("step", timeout_secs=600.0)
        return Start() if step is None else Start(checkpoint.read(directory, step))
    saved = checkpoint.newest(directory) if resume and directory.is_dir() else None
    if saved is not None and not _goes_on(saved.about, restarted):
        saved = None
    record.check_workdir(workdir, config, may_differ=_MAY_DIFFER if saved else ())
    start = Start(saved)
    if saved is None:
        checkpoint.clear(directory)
    else:
        start.lines, dropped = record.kept_lines(workdir, saved.about["rounds"])
        start.examples_recomputed = saved.about["examples_recomputed"] + dropped
        _check_workers(saved, parts)
    if board is not None:
        board.post("step", None if saved is None else saved.step)
    return start


def _goes_on(about: dict[str, Any], restarted: bool) -> bool:
    return restarted or not about["finished"]


def kept_solutions(
    workdir: pathlib.Path | None, *, resume: bool = True, restarted: bool = False
) -> dict[str, solutions.Numbers]:
    """Those of the run that goes on; empty where it begins anew. Changes nothing.

    All checkpoints of a run have the same, so that one whose arrays are damaged tells them too.
    """
    if workdir is None or not resume or not (workdir / DIRECTORY).is_dir():
        return {}
    about = checkpoint.newest_about(workdir / DIRECTORY)
    if about is None or not _goes_on(about, restarted):
        return {}
    return about.get("solutions", {})


_MAY_DIFFER = ("checkpoint", "cluster", "quota")
"""Groups of the configuration that a run may be resumed with other values of."""


def _check_workers(saved: checkpoint.Saved, parts: setup.RunParts) -> None:
    before, now = saved.about["num_workers"], len(parts.devices)
    if before != now and parts.config.data.sharing == "private":
        raise ValueError(
            f"the checkpoint of round {saved.step} has {before} workers and this run {now}: with "
            "data.sharing='private' each worker owns a shard, so resume with the same number, or "
            "give another directory"
        )


class Keeper:
    """Saves a run; process 0 writes, in the background, and the others help to gather.

    Args:
        workdir: of the run.
        parts: of the run.
    """

    def __init__(self, workdir: pathlib.Path, parts: setup.RunParts) -> None:
        self._parts, self._every_secs = parts, parts.config.checkpoint.every_secs
        self._checkpoints = None
        if parts.leads:
            keep = parts.config.checkpoint.keep
            self._checkpoints = checkpoint.Checkpoints(workdir / DIRECTORY, keep=keep)
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save, by the clock of process 0."""
        late = time.monotonic() - self._last >= self._every_secs > 0
        return late and self._checkpoints is not None

    def save(
        self,
        state: run_records.RunState,
        best_params: types.PyTree,
        *,
        finished: bool,
        **about: Any,
    ) -> None:
        """Takes the run as it is, and returns while it is written; waits for the save before.

        All processes call it. What is known of the run goes into `about`.

        Raises:
            ValueError: it, or the save before it, could not be written.
        """
        arrays = to_arrays(state, best_params, self._parts)
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        if self._checkpoints.latest == state.rounds_done:  # as when one is interrupted after it
            return
        about |= {
            "finished": finished,
            "rounds": state.rounds_done,
            "num_workers": len(self._parts.devices),
            "has_best": best_params is not None,
            "solutions": self._parts.solved.save(),
            "versions": record.versions(),
        }
        self._checkpoints.save(state.rounds_done, arrays, about)
        self._last = time.monotonic()

    def close(self) -> None:
        """Waits until all is on the disk."""
        if self._checkpoints is not None:
            self._checkpoints.close()


def to_arrays(
    state: run_records.RunState, best_params: types.PyTree, parts: setup.RunParts
) -> dict[str, np.ndarray]:
    """All of the run as host arrays by name; every process calls it, process 0 has the result."""
    train = state.train
    common = train._replace(memory=(), worker=())
    arrays: dict[str, np.ndarray] = {}
    if parts.reducer.keeps_replicas_equal:
        arrays |= leaves.flatten(state_lib.own_row(common), "train")
    else:
        arrays |= leaves.flatten(state_lib.all_rows(common), "train")
    for name in _OF_EACH_WORKER:
        rows = state_lib.all_rows(getattr(train, name))
        if _are_equal(rows):
            rows = jax.tree.map(lambda leaf: leaf[:1], rows)
        arrays |= leaves.flatten(rows, name)
    arrays |= leaves.flatten(_on_host(state), "run")
    if best_params is not None:
        arrays |= leaves.flatten(best_params, "best_params")
    return arrays


def newest(
    directory: str | pathlib.Path, parts: setup.RunParts, config: dict[str, Any]
) -> checkpoint.Saved:
    """The newest whole checkpoint of a run's workdir, or of a directory of such.

    Args:
        directory: of a run, with or without a `config.json`.
        parts: of the run that goes on.
        config: of that run, as recorded.

    Raises:
        ValueError: there is none, or it is of a run with other parts or another rule.
    """
    directory = pathlib.Path(directory)
    if (directory / DIRECTORY).is_dir():
        directory /= DIRECTORY
    saved = checkpoint.newest(directory) if directory.is_dir() else None
    if saved is None:
        raise ValueError(
            f"restore: there is no whole checkpoint in {str(directory)!r}; give the workdir of a "
            "run, or take init()"
        )
    record.check_rule(directory.parent, config)
    _check_workers(saved, parts)
    solved, kept = parts.solved.save(), saved.about.get("solutions", {})
    others = [name for name in solved if name in kept and solved[name] != kept[name]]
    if others:
        raise ValueError(
            f"restore: this run has solved {others[0]!r} by itself, and the checkpoint has another "
            "solution, in the last bits at least: make it by Run(..., solved=lambda: "
            "hetjax.training.resume.kept_solutions(workdir))"
        )
    return saved


def from_arrays(
    saved: checkpoint.Saved, fresh: run_records.RunState, parts: setup.RunParts
) -> tuple[run_records.RunState, types.PyTree]:
    """The state and the best parameters.

    Args:
        saved: from `to_arrays`.
        fresh: the state at the beginning, whose structures it takes.
        parts: of the run.
    """
    arrays, num_workers = saved.arrays, len(parts.devices)
    same_workers = saved.about["num_workers"] == num_workers
    one = jax.device_get(state_lib.own_row(fresh.train))
    common = one._replace(memory=(), worker=())
    if parts.reducer.keeps_replicas_equal:
        rows = _repeated(leaves.unflatten(common, arrays, "train"), num_workers)
    else:
        like = _repeated(common, saved.about["num_workers"])
        rows = _fitted(leaves.unflatten(like, arrays, "train"), num_workers)
    kept = {}
    for name in _OF_EACH_WORKER:
        like = _repeated(getattr(one, name), num_workers)
        found = leaves.unflatten(like, arrays, name, check_shapes=False)
        if _num_rows(found) == 1:
            found = _repeated(jax.tree.map(lambda leaf: leaf[0], found), num_workers)
        same_shapes = jax.tree.map(np.shape, found) == jax.tree.map(np.shape, like)
        kept[name] = found if same_shapes else like
    train = rows._replace(**kept)
    train = jax.device_put(train) if parts.mesh is None else mesh_lib.place(train, parts.mesh)

    like = _on_host(fresh)
    if same_workers:
        state = leaves.unflatten(like, arrays, "run", check_shapes=False)
    else:
        stream = leaves.unflatten(like.stream, arrays, "run/stream", check_shapes=False)
        epoch = np.full(num_workers, parts.stream.epoch(stream))
        rounds_done = saved.about["rounds"]
        state = like._replace(stream=stream, passes=epoch, rounds_done=rounds_done)
    best = None
    if saved.about["has_best"]:
        best = leaves.unflatten(one.params, arrays, "best_params")
    state = state._replace(train=train, carried=fresh.carried, lineage=fresh.lineage, generation=0)
    return state, best


def _on_host(state: run_records.RunState) -> run_records.RunState:
    """What of a state lies on the host: a pytree of arrays and numbers."""
    return state._replace(train=(), carried=(), lineage=None, generation=0)  # type: ignore[arg-type]


def _num_rows(rows: types.PyTree) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(rows)), 0)


def _are_equal(rows: types.PyTree) -> bool:
    return all(
        np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        for leaf in jax.tree.leaves(rows)
    )


def _repeated(row: types.PyTree, num_workers: int) -> types.PyTree:
    return mesh_lib.add_worker_axis(row, num_workers)


def _fitted(rows: types.PyTree, num_workers: int) -> types.PyTree:
    """Rows as they are; their mean for each worker where there were others."""

    def fit(leaf: np.ndarray) -> np.ndarray:
        if len(leaf) == num_workers:
            return leaf
        is_float = jax.dtypes.issubdtype(leaf.dtype, np.inexact)
        row = leaf.mean(axis=0, dtype=np.float64).astype(leaf.dtype) if is_float else leaf[0]
        return np.broadcast_to(row, (num_workers, *row.shape))

    return jax.tree.map(fit, rows)
