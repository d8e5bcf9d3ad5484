"""A worker of the drill `each_step`: it wraps functions of hetjax, so that it can be hit at a step.

    python -m experiments.drills.each_step_worker DIRECTORY

The drill writes into `wanted` there which step, which role and which signal it wants. The first
worker that is at the step in the role claims it, and sends itself the signal. What each does of a
round it appends to a file of its own before others can see it, so that it outlives a kill.
"""

import base64
import json
import os
import pathlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax.checkpoints import files as checkpoint_files
from hetjax.comm import double_buffer, elastic, elastic_sums, runtime, shared_sums, state_transfer
from hetjax.comm import membership as membership_lib
from hetjax.records import checkpoint_manager, workdir

SIZE, BUDGET, MICROBATCH, EVERY_ROUNDS = 480, 12, 4, 40
PAUSE_SECS = 0.012  # of a microbatch
SIGNALS = {"kill": signal.SIGKILL, "sleep": signal.SIGSTOP, "nap": signal.SIGSTOP}
_SPOILED = 0xA5  # a byte of what is half written
_LINK = os.link  # which `wrap` replaces


class Worker:
    """What this process is in its run, and what is wanted of it.

    Args:
        directory: of the drill.
        place: of this process.
    """

    def __init__(self, directory: pathlib.Path, place: membership_lib.MembershipClient) -> None:
        self._directory, self._place = directory, place
        self._wanted_at, self._seen = os.fspath(directory / "wanted"), (0, 0)
        self._wanted: dict[str, Any] = {}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._trace = os.open(directory / f"trace.{place.incarnation}", flags, 0o600)
        self.joins, self.number = place.is_newcomer, 0
        self.note("began", seat=place.process_id, pid=os.getpid())

    @property
    def start(self) -> int:
        return self._place.incarnation

    @property
    def last(self) -> membership_lib.MembershipView:
        """That this process has adopted."""
        assert self._place.last is not None
        return self._place.last

    def note(self, event: str, number: int = -1, **more: Any) -> None:
        """Appends an event of a round to the trace."""
        line = [event, number, time.monotonic(), more]
        os.write(self._trace, f"{json.dumps(line)}\n".encode())

    def reach(self, step: str, *, half: np.ndarray | None = None, role: str = "") -> None:
        """Is hit, where this is the wanted step and role; leaves `half` half written."""
        try:
            found = os.stat(self._wanted_at)
        except FileNotFoundError:
            return
        if (seen := (found.st_ino, found.st_mtime_ns)) != self._seen:
            try:
                self._wanted = json.loads(pathlib.Path(self._wanted_at).read_text())
            except FileNotFoundError:
                return
            self._seen = seen
        wanted = self._wanted
        if step != wanted["step"] or (role or self.role) != wanted["role"] or not self._claims():
            return
        if half is not None:
            half.view(np.uint8)[: -(-half.nbytes // 2)] = _SPOILED
        signal.pthread_kill(threading.get_ident(), SIGNALS[wanted["kind"]])

    @property
    def role(self) -> str:
        if self.joins:
            return "joiner"
        return "proposer" if self._place.leads else "other"

    def _claims(self) -> bool:
        """Whether no other has claimed what is wanted."""
        claim = self._directory / f"claim.{self._wanted['case']}"
        new = claim.with_name(f"{claim.name}.{self.incarnation}")
        own = {"start": self.incarnation, "seat": self._place.process_id, "pid": os.getpid()}
        new.write_text(json.dumps(own | {"round": self.number, "at": time.monotonic()}))
        try:
            _LINK(new, claim)
        except FileExistsError:
            return False
        finally:
            new.unlink()
        return True


class _HalfWay(dict[str, np.ndarray]):
    """Arrays of which a reader is hit behind the first."""

    def __init__(self, arrays: dict[str, np.ndarray], reach: Callable[[], None]) -> None:
        super().__init__(arrays)
        self._reach = reach

    def values(self) -> Any:
        def each() -> Iterator[np.ndarray]:
            for k, array in enumerate(super(_HalfWay, self).values()):
                if k == 1:
                    self._reach()
                yield array

        return each()


def wrap(worker: Any, patch: Callable[..., object] = setattr) -> None:
    """Has all steps of this process tell `worker` that they are reached.

    Args:
        worker: as `Worker`.
        patch: sets an attribute.
    """

    def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Replaces a function by what is decorated, which gets it as its first argument."""
        inner = getattr(owner, name)

        def set_to(outer: Callable[..., Any]) -> None:
            patch(owner, name, lambda *args, **kwargs: outer(inner, *args, **kwargs))

        return set_to

    _wrap_halves(worker, around)
    _wrap_decisions(worker, around)
    _wrap_coming(worker, around)
    _wrap_driver(worker, around)


def _wrap_halves(worker: Any, around: Callable[..., Any]) -> None:
    """All that is written into halves and read from them: what is told, contributions, sums."""
    kinds: Any = weakref.WeakKeyDictionary()  # (what it is, whose) of each of the halves
    seen: set[tuple[Any, ...]] = set()  # in this round

    @around(double_buffer.DoubleBuffer, "__init__")
    def _(inner: Any, half: Any, path: pathlib.Path, *args: Any, **kwargs: Any) -> None:
        inner(half, path, *args, **kwargs)
        name, _, start = path.name.partition(".")
        kinds[half] = name.rpartition("-")[2], int(start)

    @around(double_buffer.DoubleBuffer, "begin")
    def _(inner: Any, half: Any, number: int) -> Any:
        kind, _ = kinds[half]
        if kind == "own":
            worker.number = number
            seen.clear()
        worker.reach(f"{kind}: before")
        found = inner(half, number)
        if kind != "added":
            worker.reach(f"{kind}: half", half=found)
        return found

    @around(double_buffer.DoubleBuffer, "end")
    def _(inner: Any, half: Any, number: int) -> None:
        kind, _ = kinds[half]
        if kind == "own":
            content = base64.b64encode(half.halves[number % 2].tobytes()).decode()
            worker.note("written", number, content=content)
        worker.reach(f"{kind}: written")
        inner(half, number)
        if kind == "told":
            worker.note("ready", number)
        worker.reach(f"{kind}: ended")

    @around(double_buffer.DoubleBuffer, "has")
    def _(inner: Any, half: Any, number: int) -> Any:
        kind, start = kinds[half]
        if (kind, start) not in seen and (start != worker.incarnation or kind != "told"):
            seen.add((kind, start))
            if (nth := sum(each[0] == kind for each in seen)) <= 2:
                worker.reach(f"{kind}: looked at {nth}")
        return inner(half, number)

    @around(shared_sums, "add_up")
    def _(inner: Any, rows: Any, total: np.ndarray) -> None:
        is_first = ("add_up",) not in seen
        seen.add(("add_up",))
        if is_first:
            worker.reach("added: half", half=total)
        inner(rows, total)
        if is_first:
            worker.reach("added: summed")

    @around(elastic_sums.ElasticSums, "total")
    def _(inner: Any, sums: Any, contributed: Any, host_secs: Any) -> Any:
        found = inner(sums, contributed, host_secs)
        if seen:  # no warm-up
            total = np.asarray(found.sums).tobytes()
            number, members = worker.last.number, worker.last.sum
            content = base64.b64encode(total).decode()
            worker.note("applied", number, sum=members, content=content)
            worker.reach("look: passed")
            seen.clear()
        return found


def _wrap_decisions(worker: Any, around: Callable[..., Any]) -> None:
    state = {"decides": False, "wake": ""}

    @around(membership_lib.MembershipClient, "decide")
    def _(inner: Any, place: Any, decision: Any) -> Any:
        if decision.number < 0:
            return inner(place, decision)
        worker.reach("decide: before")
        state["decides"] = True
        stands = inner(place, decision)
        state["decides"] = False
        if stands == decision:
            worker.note("set", decision.number, decision=decision)
        worker.reach("decide: returned")
        return stands

    @around(os, "link")
    def _(inner: Any, *args: Any, **kwargs: Any) -> None:
        if state["decides"]:
            worker.reach("decide: file")
        inner(*args, **kwargs)
        if state["decides"]:
            worker.reach("decide: linked")

    @around(membership_lib.MembershipClient, "decided")
    def _(inner: Any, place: Any, number: int) -> Any:
        stands = inner(place, number)
        if number >= 0 and stands is not None:
            worker.reach("decide: heard")
        return stands

    @around(membership_lib.MembershipClient, "wake")
    def _(inner: Any, *args: Any) -> None:
        if state["wake"]:
            worker.reach("told: ready")
        state["wake"] = ""
        inner(*args)

    @around(elastic.Elastic, "allgather")
    def _(inner: Any, member: Any, messages: Any) -> Any:
        state["wake"] = "" if member.turn.is_warm_up else "told: ready"
        found = inner(member, messages)
        if not member.turn.is_warm_up:
            last = worker.last
            worker.note("adopted", last.number, decision=last)
            worker.reach("decide: adopted")
        return found

    @around(membership_lib.MembershipClient, "end")
    def _(inner: Any, place: Any, code: int, words: str) -> None:
        worker.note("ends", worker.number, code=code, words=words)
        inner(place, code, words)


def _wrap_coming(worker: Any, around: Callable[..., Any]) -> None:
    @around(membership_lib.MembershipClient, "ask")
    def _(inner: Any, place: Any) -> None:
        worker.reach("ask: before")
        inner(place)
        worker.reach("ask: asked")

    @around(elastic.Elastic, "receive_state")
    def _(inner: Any, member: Any) -> Any:
        found = inner(member)
        worker.note("taken", worker.last.number, decision=worker.last)
        worker.reach("take: taken")
        return found

    @around(state_transfer, "read")
    def _(inner: Any, path: Any) -> Any:
        worker.reach("take: named")
        found = inner(path)
        worker.reach("take: read")
        return found

    @around(state_transfer, "write")
    def _(inner: Any, path: Any, arrays: Any, about: Any) -> None:
        worker.note("handing", worker.last.number)
        worker.reach("hand: before", role="donor")
        inner(path, _HalfWay(arrays, lambda: worker.reach("hand: half", role="donor")), about)
        worker.reach("hand: written", role="donor")


def _wrap_driver(worker: Any, around: Callable[..., Any]) -> None:
    @around(elastic.Elastic, "begins")
    def _(inner: Any, member: Any, number: int | None, point: Any) -> None:
        inner(member, number, point)
        if number is not None:
            worker.reach("round: begun")

    @around(elastic.Elastic, "sends_state")
    def _(inner: Any, member: Any) -> Any:
        worker.reach("round: applied")
        worker.joins = False
        if found := inner(member):
            worker.reach("hand: due", role="donor")
        return found

    @around(workdir.Recorder, "add")
    def _(inner: Any, *args: Any) -> None:
        worker.reach("line: before")
        inner(*args)
        worker.reach("line: written")

    @around(checkpoint_manager.CheckpointManager, "save")
    def _(inner: Any, *args: Any, **kwargs: Any) -> None:
        worker.reach("save: before")
        inner(*args, **kwargs)
        worker.reach("save: begun")

    @around(checkpoint_files, "seal")
    def _(inner: Any, *args: Any) -> Any:
        worker.reach("save: unsealed")
        return inner(*args)


def problem(pause: Callable[[], None] | None) -> tuple[Any, dict[str, np.ndarray]]:
    """`(loss_fn, data)` of least squares; a microbatch calls `pause`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZE, 6))
    data = {"x": x, "y": x @ np.arange(6.0) + 0.1 * rng.normal(size=SIZE)}

    def paused(x: np.ndarray) -> np.ndarray:
        assert pause is not None
        pause()
        return np.zeros_like(x)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        losses = (batch["x"] @ params - batch["y"]) ** 2
        if pause is None:
            return losses
        shape = jax.ShapeDtypeStruct((), losses.dtype)
        return losses + jax.pure_callback(paused, shape, jax.lax.stop_gradient(losses.sum()))

    return loss_fn, data


def fit(pause: Callable[[], None] | None = None, **fields: Any) -> Any:
    loss_fn, data = problem(pause)
    return hetjax.fit(
        loss_fn,
        jnp.zeros(6),
        optax.sgd(0.02, momentum=0.5),
        data,
        epochs=1_000_000,
        seed=3,
        microbatch_size=MICROBATCH,
        budget=BUDGET,
        progress=False,
        loss_over="microbatch",
        **fields,
    )


def main(directory: pathlib.Path) -> None:
    """Trains until there is a file `over`."""
    jax.config.update("jax_enable_x64", True)
    hetjax.join_processes()
    place = runtime.current().membership
    assert isinstance(place, membership_lib.MembershipClient)
    worker = Worker(directory, place)
    wrap(worker)

    def pause() -> None:
        time.sleep(PAUSE_SECS)
        if place.last is not None:
            worker.reach("round: computing")

    over = directory / "over"
    result = fit(
        pause,
        workdir=str(directory / "run"),
        checkpoint={"every_rounds": EVERY_ROUNDS},
        callbacks=[lambda report: over.exists()],
    )
    told = {name: result.summary[f"examples_{name}"] for name in ("missing", "duplicated")}
    told |= {"params": [float(x).hex() for x in result.params], "lines": len(result.history)}
    (directory / f"result.{place.incarnation}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
