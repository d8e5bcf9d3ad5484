"""What of a run is saved between two rounds, and how a run goes on from it.

A checkpoint holds all that the rounds to come depend on. Of the training state that is one copy of
what the workers have in common, and a row for each worker of what they have not. Orders, ledger and
the quota policy's state stand beside it. With another number of workers the examples, the orders
and the parameters stay as they were; speeds are learnt anew, and replicas that differed begin at
their mean.
"""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import messages, paths, types
from hetjax.checkpoints import checkpoint, leaves
from hetjax.config import experiment as config_lib
from hetjax.config import recorded
from hetjax.inputs import fingerprint
from hetjax.rounds import judged, run_state
from hetjax.rounds import setup as setup_lib
from hetjax.rounds import state as state_lib

logger = logging.getLogger(__name__)

DIRECTORY = "checkpoints"  # in the workdir
MAY_GROW = ("epochs", "max_rounds")
"""Fields of which a run may be resumed with more."""
AVERAGE = "train/average/"  # before the names of the arrays of one
JUDGED = "judged_params"  # where they are others than those that are trained
_OPTIMIZER = "train/opt_state"
_POLICIES = "run/policies"
_GONE: Any = {"generations": (), "generation": 0}  # of the rounds, not saved
_repeated = mesh_lib.add_worker_axis


def to_arrays(
    state: run_state.RunState, best: types.PyTree, setup: setup_lib.Setup
) -> dict[str, np.ndarray]:
    """All of the run as host arrays by name; every process calls it, process 0 has the result."""
    train = state.train
    common = train._replace(memory=(), worker=())
    read = mesh_lib.own_row if setup.methods.reducer.keeps_replicas_equal else state_lib.all_rows
    arrays = leaves.flatten(read(common), "train")
    for name in setup.kept_rows:  # where the leader changes, the leader's alone
        rows = state_lib.all_rows(getattr(train, name))
        if all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(rows)):
            rows = jax.tree.map(lambda leaf: leaf[:1], rows)
        arrays |= leaves.flatten(rows, name)
    if judged.found(train.opt_state):
        rows = judged.of(train.params, train.opt_state)
        arrays |= leaves.flatten(read(rows), JUDGED)
    return arrays | rounds_to_arrays(state.rounds) | best_to_arrays(best)


def best_to_arrays(best: types.PyTree) -> dict[str, np.ndarray]:
    """The best parameters, or the best `Model`, by name; None: there are none."""
    model = best if isinstance(best, types.Model) else types.Model(best, ())
    arrays = leaves.flatten(model.params, "best_params")
    return arrays | leaves.flatten(model.state, "best_model_state")


def best_from_arrays(
    arrays: dict[str, np.ndarray], train: types.TrainState, setup: setup_lib.Setup
) -> types.PyTree:
    """What `best_to_arrays` was given.

    Args:
        arrays: where it is among others.
        train: of one worker, on the host; the best is of the same structure.
        setup: of the run.
    """
    best = leaves.unflatten(train.params, arrays, "best_params")
    if not setup.is_stateful:
        return best
    return types.Model(best, leaves.unflatten(train.model_state, arrays, "best_model_state"))


def rounds_to_arrays(rounds: run_state.RoundsState) -> dict[str, np.ndarray]:
    """What of a run lies on the host, by name."""
    return leaves.flatten(rounds._replace(**_GONE), "run")


def check_shards(saved: checkpoint.Saved, setup: setup_lib.Setup) -> None:
    """Refuses shards of other sizes: other proportions or workers cut them otherwise."""
    sizes, sharing = [len(ids) for ids in setup.stream.shards], setup.config.data.sharing
    names = [f"run/stream/passes/{index}/queue" for index in range(saved.about["num_workers"])]
    before = [len(saved.arrays[name]) for name in names if name in saved.arrays]
    is_other = saved.about["num_workers"] != len(setup.where.devices)
    if sharing != "shared" and (is_other or (before and before != sizes)):
        raise ValueError(
            f"the checkpoint of round {saved.about['rounds']} has {saved.about['num_workers']} "
            f"workers and this run {len(setup.where.devices)}, with shards of {before} examples "
            f"and of {sizes}: with data.sharing={sharing!r} these and quota.proportions must stay"
        )


def newest(
    directory: str | pathlib.Path, setup: setup_lib.Setup, config: dict[str, Any]
) -> tuple[checkpoint.Saved, list[str]]:
    """The newest whole checkpoint of a run's workdir, or of a directory of such.

    Args:
        directory: of a run, with or without a `config.json`.
        setup: of the run that goes on.
        config: of that run, as recorded.

    Returns:
        the checkpoint, and of what this run has more, as `recorded.all_grown`.

    Raises:
        ValueError: there is none, or it is of a run of another configuration or rule.
    """
    directory = paths.on_disk(directory)
    if (directory / DIRECTORY).is_dir():
        directory /= DIRECTORY
    saved = checkpoint.newest(directory) if directory.is_dir() else None
    if saved is None:
        raise ValueError(
            f"restore: there is no whole checkpoint in {str(directory)!r}; give a run's workdir"
        )
    way = "give the directory of another run, or take init()"
    recorded.check(
        directory.parent, config, may_grow=MAY_GROW, way=way, may_differ=recorded.MAY_DIFFER
    )
    check_shards(saved, setup)
    solved, kept = setup.company.solved.save(), saved.about.get("solutions", {})
    if others := [name for name in solved if name in kept and solved[name] != kept[name]]:
        raise ValueError(
            f"restore: this run's solution of {others[0]!r} is not the checkpoint's; make it by "
            "Run(..., solved=lambda: hetjax.records.checkpoint_manager.solved_in(workdir))"
        )
    return saved, recorded.all_grown(directory.parent, config, MAY_GROW)


def check_given(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    saved: checkpoint.Saved | None,
    setup: setup_lib.Setup,
    *,
    is_grown: bool,
    **how: Any,
) -> None:
    """Refuses something else than what a run began with, or tells of it.

    With more epochs a schedule that ends with them is another one: so the optimiser may differ.

    Args:
        there, here: digests of that run, and of this one.
        saved: the checkpoint that is gone on from; None: it is written over.
        setup: of this run.
        is_grown: whether this run has more rounds or epochs.
        **how: of `fingerprint.check`.

    Raises:
        ValueError: something differs.
    """
    found, told = fingerprint.differences(there, here), []
    if saved is not None and "optimizer" in found:
        found["optimizer"] += given_anew(saved.arrays, setup)
    if is_grown and (excused := found.pop("optimizer", "")):
        told.append(f"{excused}, as a schedule over all epochs does; its state goes on")
    told.append(fingerprint.check(found, **how))
    for text in filter(None, told if setup.where.leads else ()):
        logger.warning(text)


def given_anew(kept: Mapping[str, np.ndarray], setup: setup_lib.Setup) -> str:
    """What can be seen of an optimiser that differs from its state that goes on.

    Seen are the numbers of `optax.inject_hyperparams` that no schedule sets.

    Args:
        kept: the state, by the names of `to_arrays`.
        setup: of the run, with the optimiser.

    Returns:
        Words in brackets; "" where nothing is seen to differ.
    """

    def number(path: Any, leaf: jax.Array) -> jax.Array | None:
        return leaf if ".hyperparams[" in jax.tree_util.keystr(path) else None

    told, own = [], jax.tree.map_with_path(number, mesh_lib.own_row(setup.begun.opt_state))
    for name, leaf in leaves.flatten(own, _OPTIMIZER).items():
        of, _, key = name.rpartition("/hyperparams/")
        is_set = any(other.startswith(f"{of}/hyperparams_states/{key}/") for other in kept)
        if not is_set and np.any(kept.get(name, leaf) != leaf):
            told.append(f"{key}: given {np.mean(leaf):g}, kept {np.mean(kept[name]):g}")
    return f" ({', '.join(told)})" if told else ""


def from_train(train: Any, setup: setup_lib.Setup) -> types.TrainState:
    """The training state of another run, with the workers and the order of this one.

    Raises:
        ValueError: it is none, or of another model or optimiser.
    """
    if not isinstance(train, types.TrainState):
        raise ValueError(f"init_state is a {type(train).__name__}; it must be a hetjax.TrainState")
    num_workers = setup.where.num_rows
    own = jax.device_get(mesh_lib.own_row(setup.begun))
    like = own._replace(memory=(), worker=())
    given = state_lib.all_rows(train._replace(memory=(), worker=()))
    if bool(given.average) != bool(own.average):  # begins here, or is not asked for
        point = judged.of(given.params, given.opt_state)
        average = state_lib.begun_average(point, given.model_state) if own.average else ()
        given = given._replace(average=average)
    begun = _repeated(setup.by_name.values.at(setup.rounds_an_epoch, given), _num_rows(given))
    if jax.tree.map(np.shape, begun) != jax.tree.map(np.shape, given.values):
        given = given._replace(values=begun)
    like = _repeated(like, _num_rows(given))
    with messages.as_mistake("init_state is not of this model and optimizer: "):
        rows = leaves.unflatten(like, leaves.flatten(given, "state"), "state")
    seen = given_anew(leaves.flatten(given.opt_state, _OPTIMIZER), setup)
    if seen and setup.where.leads:
        logger.info(f"the optimizer was given anew{seen}; its state is that of init_state")
    if setup.methods.reducer.keeps_replicas_equal:
        rows = fitted(rows, 1)
    given = fitted(rows, num_workers)
    kept = {name: _repeated(getattr(own, name), rows) for name, rows in setup.kept_rows.items()}
    return setup.where.place(given._replace(**kept))


def from_arrays(
    saved: checkpoint.Saved, fresh: run_state.RunState, setup: setup_lib.Setup
) -> tuple[run_state.RunState, types.PyTree]:
    """The state and the best parameters, as a `Model` where that keeps state.

    Args:
        saved: from `to_arrays`.
        fresh: the state at the beginning, whose structures it takes.
        setup: of the run.
    """
    arrays, num_workers = _with_average(saved, setup), setup.where.num_rows
    arrays = {"train/progress_rest": np.zeros_like(arrays["train/progress_rounds"])} | arrays
    one = jax.device_get(mesh_lib.own_row(fresh.train))
    common = one._replace(memory=(), worker=())
    if setup.methods.reducer.keeps_replicas_equal:
        rows = _repeated(leaves.unflatten(common, arrays, "train"), num_workers)
    else:
        like = _repeated(common, saved.about["num_workers"])
        rows = fitted(leaves.unflatten(like, arrays, "train"), num_workers)
    kept = {}
    for name, num_rows in setup.kept_rows.items():
        like = _repeated(getattr(one, name), num_rows)
        found = leaves.unflatten(like, arrays, name, check_shapes=False)
        num_found = _num_rows(found)
        found = fitted(found, num_rows) if num_found == 1 else found
        is_other = jax.tree.map(np.shape, found) != jax.tree.map(np.shape, like)
        if name == "worker" and num_found and (is_other or setup.where.leading is not None):
            found, is_other = fitted(found, num_rows), False
            told = "as a copy of the leader's" if num_found == 1 else "at the mean of all workers'"
            if setup.programs.main.rule.traits.resized == "fresh":
                found, told = like, "anew"
            whose = "each worker" if setup.where.leading is None else f"worker {setup.where.own[0]}"
            if setup.where.leads or setup.where.leading is not None:
                logger.info(f"what the rule keeps for {whose} begins {told}")
        kept[name] = like if is_other else found
    train = setup.where.place(rows._replace(**kept))
    best = best_from_arrays(arrays, one, setup) if saved.about["has_best"] else None
    return fresh._replace(train=train, rounds=rounds_from_arrays(saved, fresh.rounds, setup)), best


def _with_average(saved: checkpoint.Saved, setup: setup_lib.Setup) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint; an average that it lacks begins at its parameters, one that this
    run does not keep is left out, one by another `ema` goes on, and each is told."""
    ema, by = setup.config.ema, saved.about.get("ema", setup.config.ema)
    arrays = {name: a for name, a in saved.arrays.items() if not name.startswith(AVERAGE)}
    has, done = len(arrays) < len(saved.arrays), f"in the checkpoint of round {saved.step}"
    text = ""
    if has and ema:
        arrays = saved.arrays
        text = "" if by == ema else f"ema={ema:g} from here on; the average {done} is by {by:g}"
    elif ema:
        text = f"ema={ema:g} begins at the parameters {done}, which holds no average"
        for before, after in ((judged_in(arrays), "params"), ("train/model_state", "state")):
            arrays |= {
                AVERAGE + after + name.removeprefix(before): state_lib.wide(a)
                for name, a in saved.arrays.items()
                if name == before or name.startswith(f"{before}/")
            }
    elif has:
        text = f"the average {done} is left out: this run has no ema"
    if text and setup.where.leads:
        logger.info(text)
    return arrays


def judged_in(arrays: Mapping[str, Any]) -> str:
    """Where the parameters to evaluate are among the arrays of a checkpoint."""
    return JUDGED if any(name.partition("/")[0] == JUDGED for name in arrays) else "train/params"


def rounds_from_arrays(
    saved: checkpoint.Saved, fresh: run_state.RoundsState, setup: setup_lib.Setup
) -> run_state.RoundsState:
    """What of a run lies on the host; arguments as of `from_arrays`."""
    arrays, num_workers = saved.arrays, len(setup.where.devices)
    like = fresh._replace(**_GONE)
    check_shards(saved, setup)
    if saved.about["num_workers"] == num_workers:
        others = {name: a for name, a in arrays.items() if not name.startswith(f"{_POLICIES}/")}
        rounds = leaves.unflatten(like._replace(policies={}), others, "run")
        rounds = rounds._replace(policies=_policies(saved, like.policies, setup))
    else:
        stream = leaves.unflatten(like.stream, arrays, "run/stream")
        epoch = np.full(num_workers, setup.stream.epoch(stream))
        rounds = like._replace(stream=stream, passes=epoch, rounds_done=saved.about["rounds"])
    return rounds._replace(generations=fresh.generations, generation=0)


def policy_of(setup: setup_lib.Setup) -> dict[str, Any]:
    """The quota policy of a run, as a checkpoint tells of it: its name and options."""
    quota = config_lib.to_dict(setup.config)["quota"]
    return {name: value for name, value in quota.items() if name != "max_microbatches"}


def with_learned(
    rounds: run_state.RoundsState, found: Any, setup: setup_lib.Setup
) -> run_state.RoundsState:
    """A run's rounds, with what the policy of another one knows."""
    try:
        arrays = leaves.flatten(found, _POLICIES)
        return rounds._replace(policies=leaves.unflatten(rounds.policies, arrays, _POLICIES))
    except ValueError:
        logger.info("quotas are learnt anew: workers or policy are others than init_state's")
        return rounds


def _policies(
    saved: checkpoint.Saved, fresh: dict[str, Any], setup: setup_lib.Setup
) -> dict[str, Any]:
    """What the policy knew; one that is another than in the checkpoint begins anew, which is told.

    A checkpoint of an older version does not tell of its policy: there its state has to fit.
    """
    now, before = policy_of(setup), saved.about.get("quota")
    if before in (None, now):
        try:
            return leaves.unflatten(fresh, saved.arrays, _POLICIES)
        except ValueError:
            before = None
    if setup.where.leads:
        was = "with another state" if before is None else f"{before['policy']!r}"
        if before is not None and before["policy"] == now["policy"]:
            was += " with other options"
        logger.info(
            f"quota.policy={now['policy']!r} begins anew and learns from this round on: "
            f"in the checkpoint of round {saved.about['rounds']} the policy is {was}"
        )
    return fresh


def _num_rows(rows: types.PyTree) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(rows)), 0)


def fitted(rows: types.PyTree, num_workers: int) -> types.PyTree:
    """A row for each worker: as they are, or their mean where there were others; on the host."""

    def fit(leaf: np.ndarray) -> np.ndarray:
        if len(leaf) == num_workers:
            return leaf
        row = leaf[0]
        if len(leaf) > 1 and jax.dtypes.issubdtype(leaf.dtype, np.inexact):
            row = leaf.mean(axis=0, dtype=np.float64).astype(leaf.dtype)
        return _repeated(row, num_workers)

    return jax.tree.map(fit, rows)
