"""A worker of the drill `each_step`: it wraps functions of hetjax, so that it can be hit at a step.

    python -m experiments.drills.each_step_worker DIRECTORY [LIFE]

The drill writes into `wanted` there which step, which role and which signal it wants. The first
worker that is at the step in the role claims it, and sends itself the signal. Each notes in `told`
when it began, each view that it adopts, and why it ends.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax.checkpoints import files as checkpoint_files
from hetjax.comm import elastic, local_carrier, membership, shared_sums
from hetjax.liveness import heartbeats
from hetjax.records import checkpoint_manager, workdir

WORKERS, SIZE, BUDGET, MICROBATCH, EVERY_ROUNDS = 4, 480, 12, 4, 40
MICROBATCH_SECS = 0.012
SIGNALS = {"kill": signal.SIGKILL, "sleep": signal.SIGSTOP, "nap": signal.SIGSTOP}
ONE_ADDS = "one_adds"  # a file: sums count as large, so one adds for all
_ROLES = {"summed": "adder", "read": "reader"}  # of steps, whoever is there
_NEW_ROUNDS = 2  # of a newcomer: it takes a sum, then it is in one


class Worker:
    """What this process is in its run, and what is wanted of it.

    Args:
        directory: of the drill.
        life: how many launchers were before.
    """

    def __init__(self, directory: pathlib.Path, life: int) -> None:
        self._directory, self._wanted = directory, directory / "wanted"
        told = os.environ
        self._seat, self._start = int(told["HETJAX_PROCESS_ID"]), int(told["HETJAX_START"])
        self._attempt = 1000 * life + int(told["HETJAX_ATTEMPT"])
        self.roster: membership.MembershipClient | None = None
        self._new = _NEW_ROUNDS if self._start >= WORKERS else 0  # rounds in which it is a newcomer
        self._is_known = not self._new  # to the referee
        self._file = os.open(directory / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.note("began", self._seat)

    @property
    def role(self) -> str:
        if self._new:
            return "newcomer"
        leads = self._seat == 0 if self.roster is None else self.roster.leads
        return "leader" if leads else "other"

    def note(self, what: str, *more: Any) -> None:
        """Appends a line: what happened in which start of which attempt."""
        line = [what, time.monotonic(), os.getpid(), self._attempt, self._start, *more]
        os.write(self._file, f"{json.dumps(line)}\n".encode())

    def applied(self) -> None:
        """A round is over."""
        self._new = max(self._new - 1, 0)

    def reach(self, step: str) -> None:
        """Is hit, where this is the wanted step and role."""
        self._is_known |= step == "joins: sent"
        try:
            wanted = json.loads(self._wanted.read_text())
        except FileNotFoundError:
            return
        if step == "hand: due" and wanted["step"].startswith("lacks"):
            self._kill_members()  # so that those who join lack a state
        role = _ROLES.get(step.split(":")[0], self.role)
        is_wanted = (step, role) == (wanted["step"], wanted["role"])
        if is_wanted and self._claims(self._directory / wanted["claim"]):
            signal.pthread_kill(threading.get_ident(), SIGNALS[wanted["kind"]])

    def _claims(self, claim: pathlib.Path) -> bool:
        """Whether no other has claimed what is wanted."""
        new = claim.with_name(f"{claim.name}.{os.getpid()}")
        own = {"pid": os.getpid(), "attempt": self._attempt, "member": [self._seat, self._start]}
        new.write_text(json.dumps(own | {"known": self._is_known, "at": time.monotonic()}))
        try:
            os.link(new, claim)
        except FileExistsError:
            return False
        finally:
            new.unlink()
        return True

    def _kill_members(self) -> None:
        assert self.roster is not None
        lines = map(json.loads, (self._directory / "told").read_text().splitlines())
        pids = {line[4]: line[2] for line in lines if line[3] == self._attempt}
        others = [m for m in self.roster.members if m != self.roster.own]
        for pid in [*(pids[m.incarnation] for m in others), os.getpid()]:
            os.kill(pid, signal.SIGKILL)


class _Here(threading.local):
    """What a thread does."""

    calls = half = ""  # the referee; the step at half of what it copies next
    put, take = "put", "take"  # the names of its steps


def wrap(worker: Any, patch: Callable[..., object] = setattr) -> None:
    """Has all steps of this process tell `worker` that they are reached.

    Args:
        worker: as `Worker`.
        patch: sets an attribute.
    """
    here = _Here()

    def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Replaces a function by what is decorated, which gets it as its first argument."""
        inner = getattr(owner, name)

        def set_to(outer: Callable[..., Any]) -> None:
            patch(owner, name, lambda *args, **kwargs: outer(inner, *args, **kwargs))

        return set_to

    _wrap_carrier(worker, around, here)
    _wrap_member(worker, around, here)
    for owner, name, before, after in (
        (workdir.Recorder, "add", "line: before", "line: written"),
        (checkpoint_manager.CheckpointManager, "save", "save: before", "save: begun"),
        (checkpoint_files, "seal", "save: unsealed", "save: sealed"),
    ):
        _wrap_steps(worker, around(owner, name), before, after)


def _wrap_steps(worker: Any, replace: Callable[..., Any], before: str, after: str) -> None:
    @replace
    def _(inner: Any, *args: Any, **kwargs: Any) -> Any:
        worker.reach(before)
        found = inner(*args, **kwargs)
        worker.reach(after)
        return found


def _wrap_carrier(worker: Any, around: Callable[..., Any], here: _Here) -> None:
    """Calls to the referee, by the name of their event or method; what is put up, taken, added."""
    carrier = local_carrier.LocalCarrier

    @around(carrier, "call")
    def _(inner: Any, self: Any, method: str, *args: Any) -> Any:
        kind = method
        if method == "call":
            _, _, event, _, waits = args
            kind = event[0] if event else "asks" if waits else "confirm"
        here.calls = kind
        worker.reach(f"{kind}: before")
        answer = inner(self, method, *args)
        here.calls = ""
        worker.reach(f"{kind}: answered")
        return answer

    @around(socket.socket, "sendall")
    def _(inner: Any, *args: Any) -> None:
        inner(*args)
        if here.calls:
            worker.reach(f"{here.calls}: sent")

    @around(carrier, "put")
    def _(inner: Any, *args: Any) -> Any:
        worker.reach(f"{here.put}: before")
        here.half = "hand: half" if here.put == "hand" else ""
        handle = inner(*args)
        here.half = ""
        worker.reach(f"{here.put}: after")
        return handle

    @around(carrier, "take")
    def _(inner: Any, self: Any, handles: Any, *args: Any) -> Any:
        def each() -> Iterator[Any]:
            for number, handle in enumerate(handles):
                if number:
                    worker.reach(f"{here.take}: half")
                yield handle

        worker.reach(f"{here.take}: before")
        taken = inner(self, each(), *args)
        worker.reach(f"{here.take}: after")
        return taken

    @around(np, "copyto")
    def _(inner: Any, to: Any, content: Any, *args: Any, **kwargs: Any) -> None:
        if half := here.half:
            here.half = ""
            inner(to[: len(to) // 2], content[: len(to) // 2])
            worker.reach(half)
        inner(to, content, *args, **kwargs)

    @around(np, "concatenate")
    def _(inner: Any, parts: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if here.half and out is not None:
            half, here.half = here.half, ""
            out[: len(out) // 2] = inner(parts)[: len(out) // 2]
            worker.reach(half)
        return inner(parts, *args, out=out, **kwargs)

    @around(shared_sums.ElasticSums, "post")  # where the others read it
    def _(inner: Any, *args: Any) -> None:
        here.half = "put: half"
        inner(*args)

    @around(shared_sums, "add_up")
    def _(inner: Any, *args: Any) -> None:
        here.half = "add: half"
        inner(*args)
        worker.reach("add: after")


def _wrap_member(worker: Any, around: Callable[..., Any], here: _Here) -> None:
    member, client = elastic.Elastic, membership.MembershipClient

    @around(client, "__init__")
    def _(inner: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        worker.roster = self

    @around(client, "end")
    def _(inner: Any, self: Any, code: int, words: str) -> None:
        worker.note("ends", code, words)
        inner(self, code, words)

    @around(shared_sums.ElasticSums, "read")
    def _(inner: Any, *args: Any) -> Any:
        here.take = "read"
        found = inner(*args)
        here.take = "take"
        return found

    @around(member, "begins")
    def _(inner: Any, self: Any, number: int | None, point: Any) -> None:
        inner(self, number, point)
        if number is not None:
            worker.reach("round: begun")

    @around(heartbeats.Heartbeats, "at")
    def _(inner: Any, self: Any, phase: str, *args: Any) -> None:
        inner(self, phase, *args)
        if phase == "computing" and worker.roster is not None and worker.roster.last is not None:
            worker.reach("round: computing")

    @around(member, "allgather")
    def _(inner: Any, self: Any, messages: Any) -> Any:
        found = inner(self, messages)
        if not self.is_warm_up:
            view = self.roster.last
            starts = [[m.incarnation for m in group] for group in (view.members, view.sum)]
            worker.note("view", view.round_index, *starts)
            worker.reach("round: decided")
        return found

    @around(member, "sends_state")
    def _(inner: Any, self: Any) -> Any:
        worker.reach("round: applied")
        worker.applied()
        if found := inner(self):
            worker.reach("hand: due")
        return found

    @around(member, "send_state")
    def _(inner: Any, self: Any, *args: Any) -> None:
        here.put = "hand"
        inner(self, *args)
        here.put = "put"

    @around(member, "receive_state")
    def _(inner: Any, self: Any) -> Any:
        here.take = "state"
        found = inner(self)
        here.take = "take"
        return found


def fit(**fields: Any) -> Any:
    """Least squares."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZE, 6))
    data = {"x": x, "y": x @ np.arange(6.0) + 0.1 * rng.normal(size=SIZE)}
    return hetjax.fit(
        lambda params, batch, rng: (batch["x"] @ params - batch["y"]) ** 2,
        jnp.zeros(6),
        optax.sgd(0.02, momentum=0.5),
        data,
        epochs=1_000_000,
        seed=3,
        microbatch_size=MICROBATCH,
        budget=BUDGET,
        progress=False,
        **fields,
    )


def main(directory: pathlib.Path, life: int = 0) -> None:
    """Trains until there is a file `over`."""
    jax.config.update("jax_enable_x64", True)
    wrap(Worker(directory, life))
    if (directory / ONE_ADDS).exists():
        shared_sums.WHOLE_BYTES = 0
    hetjax.join_processes()
    over = directory / "over"
    result = fit(
        workdir=str(directory / "run"),
        cluster={"secs_per_microbatch": [MICROBATCH_SECS] * WORKERS},
        checkpoint={"every_rounds": EVERY_ROUNDS},
        callbacks=[lambda report: over.exists()],
    )
    told = {name: result.summary[f"examples_{name}"] for name in ("missing", "duplicated")}
    told |= {"params": [float(x).hex() for x in result.params], "lines": len(result.history)}
    (directory / f"result.{os.getpid()}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
