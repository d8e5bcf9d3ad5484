"""What the processes of a run tell each other when the local phase of a round is over.

Each process decides quotas, orders and the end of the run for itself, from what all workers
did: so what they did is gathered, and with it a digest of the round's plan, which must be the
same on all. One short collective a round; none where there is one process.
"""

import enum
import hashlib
import json
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax.cluster import processes
from hetjax.data import rounds
from hetjax.training import local, record

_PATIENCE_SECS = 600.0
_MOST_CHARACTERS = 1000  # of a value that is compared as it is, and not by its digest


class Ask(enum.IntFlag):
    """What any process may ask of all of them; done after the round in which it was gathered."""

    NOTHING = 0
    SAVE = 1
    END = 2  # a callback, or the end of a replayed trace
    END_BY_SIGINT = 4
    END_BY_SIGTERM = 8

    @property
    def ends(self) -> bool:
        """Whether the run is to end."""
        return bool(self & ~Ask.SAVE)


class RoundResult(NamedTuple):
    """What all W workers did in a round; times by each worker's own clock."""

    microbatches_done: np.ndarray  # i64[W]
    first_secs: np.ndarray  # f64[W], round start to end of the first microbatch; NaN = unknown
    compute_secs: np.ndarray  # f64[W]
    local_secs: float  # until the last worker finished
    overruns: int  # microbatches slower than the emulated worker would have been
    unit_signs: list[np.ndarray] | None  # for each worker i8[done, B]
    ask: Ask  # of any process


class DisagreementError(RuntimeError):
    """The processes planned different rounds: they do not run the same program on the same data."""


def digest_of(plan: rounds.RoundPlan, round_index: int) -> int:
    """A number that two plans of a round share when they are the same."""
    parts = (plan.example_ids, plan.starts, plan.passes)
    content = b"".join(np.ascontiguousarray(part, np.int64).tobytes() for part in parts)
    content += round_index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "little")


def check_same_run(config: dict[str, Any], *, num_examples: int, leads: bool) -> None:
    """Compares what this process was given with what process 0 was.

    Raises:
        ValueError: it is another configuration, version or size of the data.
    """
    board = processes.Board()
    own: dict[str, Any] = {
        "versions": record.versions(),
        "examples": num_examples,
    }
    own |= {f"config.{name}": value for name, value in config.items()}
    own = {name: _short(value) for name, value in own.items()}
    if leads:
        for name, value in own.items():
            board.post(name, value)
        board.post("complete", True)
        return
    try:
        board.wait("complete", _PATIENCE_SECS)
    except TimeoutError as error:
        raise ValueError(
            "process 0 did not come as far as this process; look at its messages"
        ) from error
    for name, value in own.items():
        theirs = board.read(name)
        if theirs != value:
            raise ValueError(
                f"process {jax.process_index()} has {name} = {value!r} and process 0 has "
                f"{theirs!r}; start all processes of a run with the same program, configuration "
                "and data"
            )


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) > _MOST_CHARACTERS:
        return f"of SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"
    return json.loads(text)


class Agreement:
    """Gathers what the workers of all processes did.

    Args:
        mesh: the worker mesh; None for the array form, which has one process.
        most_signs: unit signs that a worker can have in a round; 0 where the order takes none.
        microbatch_size: B.
    """

    def __init__(self, mesh: Mesh | None, *, most_signs: int, microbatch_size: int) -> None:
        self._mesh, self._most_signs, self._size = mesh, most_signs, microbatch_size
        self.alone = mesh is None or len(mesh_lib.own_workers(mesh)) == mesh.size
        if mesh is not None:
            self._gather = jax.jit(lambda rows: rows, out_shardings=mesh_lib.everywhere(mesh))

    def __call__(self, result: local.LocalResult, digest: int, ask: Ask) -> RoundResult:
        """What all workers did, from what this process's workers did.

        Raises:
            DisagreementError: another process planned another round.
        """
        if self.alone or self._mesh is None:
            return _joined(
                np.stack([np.asarray(column, np.float64) for column in result[1:5]], axis=1),
                result.unit_signs,
                ask,
            )
        numbers, signs = self._gathered(result, digest, ask)
        self._check(numbers[:, 0])
        done = numbers[:, 2].astype(int)
        unit_signs = None
        if result.unit_signs is not None:
            each = zip(signs, done, strict=True)
            unit_signs = [s[: n * self._size].reshape(n, self._size) for s, n in each]
        asks = np.bitwise_or.reduce(numbers[:, 1].astype(int))
        return _joined(numbers[:, 2:], unit_signs, Ask(int(asks)))

    def _gathered(
        self, result: local.LocalResult, digest: int, ask: Ask
    ) -> tuple[np.ndarray, np.ndarray]:
        """f64[W, 6]: digest, ask and four columns of the result; and i8[W, most_signs]."""
        assert self._mesh is not None
        rows = []
        for index, worker in enumerate(mesh_lib.own_workers(self._mesh)):
            numbers = np.array([digest, ask, *(column[index] for column in result[1:5])])
            signs = np.zeros(self._most_signs, np.int8)
            if result.unit_signs is not None:
                own = result.unit_signs[index].reshape(-1)
                signs[: own.size] = own
            row = np.concatenate([numbers.astype(np.float64).view(np.int8), signs])
            rows.append(jax.device_put(row[None], self._mesh.devices[worker]))
        gathered = np.asarray(self._gather(mesh_lib.join_rows(rows, self._mesh)))
        head = 6 * np.dtype(np.float64).itemsize
        return np.ascontiguousarray(gathered[:, :head]).view(np.float64), gathered[:, head:]

    def _check(self, digests: np.ndarray) -> None:
        assert self._mesh is not None
        if (digests == digests[0]).all():
            return
        processes = [device.process_index for device in self._mesh.devices]
        others = {p for p, d in zip(processes, digests, strict=True) if d != digests[0]}
        raise DisagreementError(
            f"process {', '.join(map(str, sorted(others)))} planned another round than process 0: "
            "they do not run the same version on the same configuration and data. Start all of "
            "them from one installation and one copy of the data"
        )


def _joined(numbers: np.ndarray, unit_signs: list[np.ndarray] | None, ask: Ask) -> RoundResult:
    done, first_secs, compute_secs, overruns = numbers.T
    return RoundResult(
        done.astype(np.int64),
        first_secs,
        compute_secs,
        float(compute_secs.max()),
        int(overruns.sum()),
        unit_signs,
        ask,
    )
