"""What the processes of a run tell each other when the local phase of a round is over.

Each process decides quotas, orders and the end of the run for itself, from what all workers did.
So what they did is gathered. A digest of the round's plan comes with it, which must be the same on
all. One short message a round; none where there is one process.
"""

import enum

import jax
import numpy as np

from hetjax import mesh as mesh_lib
from hetjax import types
from hetjax.comm import communicator as communicator_lib

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


class DisagreementError(ValueError):
    """The processes were given different things, or planned different rounds."""


class WorkAllGather:
    """Gathers what the workers of all processes did.

    Args:
        communicator: how the processes meet.
        most_signs: example signs that a worker can have in a round; 0 where the order takes none.
        microbatch_size: B.
        most_numbers: of a worker in a kind of round, beside `_SUMS`.
    """

    def __init__(
        self,
        communicator: communicator_lib.Communicator,
        *,
        most_signs: int,
        microbatch_size: int,
        most_numbers: int = 0,
    ) -> None:
        self._communicator, self._size = communicator, microbatch_size
        self._message = np.dtype(  # of each worker
            [
                ("digests", [(name, np.int64) for name in PLANNED]),
                ("request", np.int64),
                ("host_secs", np.float64),
                ("done", [(name, np.float64) for name in _DONE]),
                ("sums", np.float64, (len(_SUMS) + most_numbers,)),
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
        differ = {name: digests[name] != digests[name][:1] for name in PLANNED}
        if not (parts := [name for name, is_other in differ.items() if is_other.any()]):
            return
        is_other = np.any(list(differ.values()), axis=0)
        others = set(self._communicator.process_of[self._communicator.responded][is_other].tolist())
        raise DisagreementError(
            f"process {', '.join(map(str, sorted(others)))} planned another round than process 0 "
            f"(other {' and '.join(parts)}): their programs, data or processors differ"
        )


def _own_sums(contributed: types.Contribution) -> np.ndarray:
    """What `SyncMetrics` is made of, of this process's workers: f64[w, k]."""
    tally = contributed.tally  # a worker that tells nothing counts as one without a bad microbatch
    tally = tally._replace(nonfinite_microbatch=tally.nonfinite_microbatch + 1)
    leaves = [contributed.loss_sum, contributed.weight, *tally]
    leaves += jax.tree.leaves((contributed.metric_sums, contributed.counts))
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
    own = sums[:, len(_SUMS) + len(leaves) :].T.astype(dtype)
    return types.SyncMetrics(
        losses.astype(dtype).sum(),
        weights.astype(dtype).sum(),
        examples,
        done,
        nonfinite,
        losses.astype(dtype),
        weights.astype(dtype),
        jax.tree.unflatten(treedef, list(metrics)),
        counts=types.Counts(*own[:2]) if like.counts else (),
    )
