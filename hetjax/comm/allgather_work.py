"""What the processes of a run tell each other when the local phase of a round is over.

Each process decides quotas, orders and the end of the run for itself, from what all workers did.
So what they did is gathered. A digest of the round's plan comes with it, which must be the same on
all. One short message a round; none where there is one process.
"""

import enum
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hetjax import digests as digests_lib
from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.comm import communicator as communicator_lib
from hetjax.comm import key_value_store as store_lib
from hetjax.comm import runtime
from hetjax.topology import reducers

_PATIENCE_SECS = 600.0
PLANNED = ("examples", "quotas", "exchanges")  # the parts of a round's plan, a digest each
_DONE = ("microbatches_done", "first_secs", "compute_secs", "overruns")  # of `types.Work`
_SUMS = ("loss_sum", "weight", *types.Tally._fields)  # of `Contribution`


class Request(enum.IntFlag):
    """What any process may ask of all of them; done after the round in which it was gathered."""

    NOTHING = 0
    SAVE = 1
    END = 2  # a callback, or the end of a replayed trace
    END_BY_SIGINT = 4
    END_BY_SIGTERM = 8
    END_BY_SIGHUP = 16
    END_BY_SIGUSR1 = 32
    END_BY_SIGUSR2 = 64
    NO_DATA = 128  # asks nothing: a process tells that its part has ended

    @property
    def ends(self) -> bool:
        """Whether the run is to end."""
        return bool(self & ~(Request.SAVE | Request.NO_DATA))


_PROGRAMS = ("loss", "optimizer", "rule", "estimator")  # of digests
_OF_DATA = ("examples", "other data", "another first example of the stream")


class DisagreementError(ValueError):
    """The processes were given different things, or planned different rounds."""


def check_same_run(config: dict[str, Any], examples: Any, versions: dict[str, str]) -> None:
    """Compares what this process was given with what process 0 was, before anything is made of it.

    Raises:
        DisagreementError: it is another configuration, version, or size or form of the data.
    """
    own: dict[str, Any] = {"versions": versions, "examples": examples}
    own |= {f"config.{name}": value for name, value in config.items()}
    _compare("same run", own, {})


def check_same_parts(
    digests: Mapping[str, Any],
    *,
    holds_all: bool = False,
    shards: Any = (),
    mixing: reducers.Mixing | None = None,
    trace: Any = (),
    first: types.PyTree = (),
) -> None:
    """Compares, by digests, what each process was given or has made, and all need alike.

    Args:
        digests: of the run, by name.
        holds_all: whether each process has all data; else it need not have others' shards.
        shards: the ids of private data's shards, and their shares of the examples.
        mixing: of a reducer that gossips: the partners, and their weights.
        trace: the rounds that are replayed.
        first: the first example of an iterable, which each process goes through.

    Raises:
        DisagreementError: it is not to the bit what another process has.
    """
    made = {
        "other data": digests.get("values") if holds_all else (),
        "other initial parameters": digests.get("params"),
        "other shards": shards,
        "other exchanges": mixing and (mixing.gossip.partners, mixing.gossip.weights),
        "another replayed trace": trace,
        "another first example of the stream": first,
    }
    programs = {f"another {name}": digests[name] for name in _PROGRAMS if name in digests}
    _compare("same parts", {name: digests_lib.of_arrays(made[name]) for name in made}, programs)


def _compare(what: str, own: dict[str, Any], programs: dict[str, str]) -> None:
    """Compares JSON values, by name, with those of process 0, and programs with those of the first
    process of this platform."""
    board, own_id = store_lib.KeyValueStore(what), runtime.current().process_id
    own, here = json.loads(json.dumps(own)), [own_id, programs]  # as others hear it
    if runtime.current().is_first:
        board.post(jax.default_backend(), here)
        board.post("all", own)
        return
    try:
        theirs = board.wait("all", _PATIENCE_SECS, what=f"come to the check of the {what}")
    except TimeoutError as error:
        raise DisagreementError(f"process 0 did not come to the check of the {what}") from error
    first, programs_there = board.settled(jax.default_backend(), here)
    compared = [(0, name, value, theirs.get(name)) for name, value in own.items()]
    compared += [(first, name, value, programs_there.get(name)) for name, value in programs.items()]
    if not (differ := [each for each in compared if each[2] != each[3]]):
        return
    texts = [
        f"{name} than process {by}"
        if "other " in name
        else f"{name} = {value!r} and process {by} has {there!r}"
        for by, name, value, there in differ
    ]
    way = "all need one program, learning rate, configuration and copy of the data"
    if any(name in _OF_DATA for _, name, *_ in differ):
        way = "give each process all of the data, or say data={'sharing': 'process_local'}"
    raise DisagreementError(f"process {own_id} has {', '.join(texts)}; {way}")


class WorkAllGather:
    """Gathers what the workers of all processes did.

    Args:
        communicator: how the processes meet.
        most_signs: example signs that a worker can have in a round; 0 where the order takes none.
        microbatch_size: B.
        most_metrics: of a kind of round.
    """

    def __init__(
        self,
        communicator: communicator_lib.Communicator,
        *,
        most_signs: int,
        microbatch_size: int,
        most_metrics: int = 0,
    ) -> None:
        self._communicator, self._size = communicator, microbatch_size
        self._message = np.dtype(  # of each worker
            [
                ("digests", [(name, np.int64) for name in PLANNED]),
                ("request", np.int64),
                ("host_secs", np.float64),
                ("done", [(name, np.float64) for name in _DONE]),
                ("sums", np.float64, (len(_SUMS) + 2 * most_metrics,)),
                ("example_signs", np.int8, (most_signs,)),
            ]
        )

    def __call__(
        self,
        contributed: types.Contribution,
        work: types.Work,
        digests: tuple[int, ...],
        request: Request,
        host_secs: float = 0.0,
    ) -> tuple[types.Work, Request, types.SyncMetrics]:
        """What all workers did, from what this process's workers did.

        Args:
            contributed: by the workers of this process.
            work: of them.
            digests: those of the round's plan.
            request: what this process wants of all.
            host_secs: what it needed since the last gathering, but for its workers' computing.

        Returns:
            the work of all workers, what any process asked, and the metrics of all workers.

        Raises:
            DisagreementError: another process planned another round.
            LostProcessError: a process of this machine has ended.
        """
        own = np.zeros(len(work.microbatches_done), self._message)
        own["digests"] = digests
        own["request"], own["host_secs"] = int(request), host_secs
        for name in _DONE:
            own["done"][name] = getattr(work, name)
        sums = _own_sums(contributed)
        own["sums"][:, : sums.shape[1]] = sums
        for row, signs in zip(own["example_signs"], work.example_signs or (), strict=False):
            row[: signs.size] = signs.reshape(-1)
        gathered = self._communicator.allgather(own)
        self._check(gathered["digests"][self._communicator.responded])
        if work.example_signs is not None:
            counts = gathered["done"]["microbatches_done"].astype(int)
            each = zip(gathered["example_signs"], counts, strict=True)
            own_signs = [s[: n * self._size].reshape(n, self._size) for s, n in each]
            work = work._replace(example_signs=own_signs)
        done = gathered["done"]
        of_all = work._replace(
            microbatches_done=done["microbatches_done"].astype(np.int64),
            first_secs=np.where(done["microbatches_done"] > 0, done["first_secs"], np.nan),
            compute_secs=done["compute_secs"],
            overruns=done["overruns"].astype(np.int64),
            host_secs=gathered["host_secs"].copy(),
        )
        asked = Request(int(np.bitwise_or.reduce(gathered["request"])))
        return of_all, asked, _metrics(gathered["sums"], contributed)

    def _check(self, digests: np.ndarray) -> None:
        """Compares the parts of the plans of all processes that were heard."""
        differ = {name: digests[name] != digests[name][0] for name in PLANNED}
        if not (parts := [name for name, is_other in differ.items() if is_other.any()]):
            return
        is_other = np.any(list(differ.values()), axis=0)
        others = set(self._communicator.process_of[self._communicator.responded][is_other].tolist())
        raise DisagreementError(
            f"process {', '.join(map(str, sorted(others)))} planned another round than process 0 "
            f"(other {' and '.join(parts)}): their programs, data or processors differ"
        )


def _own_sums(contributed: types.Contribution) -> np.ndarray:
    """What `SyncMetrics` is made of, of this process's workers: f64[w, k], `_SUMS` and metrics."""
    tally = contributed.tally  # a worker that tells nothing counts as one without a bad microbatch
    tally = tally._replace(nonfinite_microbatch=tally.nonfinite_microbatch + 1)
    leaves = [contributed.loss_sum, contributed.weight, *tally]
    leaves += jax.tree.leaves(contributed.metric_sums)
    rows = mesh_lib.worker_rows(leaves)  # on the host: an index of a jax.Array is a program
    return np.array([[np.asarray(leaf)[0] for leaf in row] for row in rows], np.float64)


def _metrics(sums: np.ndarray, like: types.Contribution) -> types.SyncMetrics:
    """Of the sums of all W workers, f64[W, k], added up as the sync phase would do it."""
    dtype = like.loss_sum.dtype
    losses, weights, *counts = sums[:, : len(_SUMS)].T
    examples, done, nonfinite = (count.astype(np.int32) for count in counts)
    nonfinite -= 1
    leaves, treedef = jax.tree.flatten(like.metric_sums)
    metrics = sums[:, len(_SUMS) : len(_SUMS) + len(leaves)].astype(dtype).sum(axis=0)
    return types.SyncMetrics(
        losses.astype(dtype).sum(),
        weights.astype(dtype).sum(),
        examples,
        done,
        nonfinite,
        losses.astype(dtype),
        weights.astype(dtype),
        jax.tree.unflatten(treedef, list(metrics)),
    )
