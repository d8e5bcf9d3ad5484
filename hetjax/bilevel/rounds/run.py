"""Hypergradients on unequal workers, one outer step at a time: each request is a round."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from hetjax import digests, extra_arguments, mesh, types
from hetjax.bilevel import machine, per_example
from hetjax.bilevel.problem import LOWER, UPPER, Bilevel, What
from hetjax.bilevel.rounds import level, setup, stepping
from hetjax.comm import allgather_work
from hetjax.inputs import agreement
from hetjax.liveness import blocking_waits
from hetjax.losses import named as named_lib
from hetjax.rounds import judged, round_report
from hetjax.rounds import state as state_lib

logger = logging.getLogger(__name__)


class BilevelState(NamedTuple):
    """A bilevel run between two outer steps; leaves of the first three `[W, ...]`."""

    x: types.PyTree
    opt: types.PyTree  # of the optimiser of x
    kept: machine.State | None  # what the estimator keeps; None before the first step
    upper: level.LevelState
    lower: level.LevelState
    steps_done: int

    @property
    def levels(self) -> dict[str, level.LevelState]:
        """Both, by name."""
        return {UPPER: self.upper, LOWER: self.lower}


class Answered(NamedTuple):
    """A request of an outer step, and its round."""

    what: What
    report: round_report.Report
    bytes_sent: float


class OuterStep(NamedTuple):
    """An outer step that is done; its numbers may still be on the devices."""

    info: dict[str, Any]  # of `machine.Info`, leaves `[W, ...]`
    asked: list[Answered]
    bytes_sent: float  # by all workers, in this step


def _nothing() -> allgather_work.Request:
    return allgather_work.Request.NOTHING


class BilevelRun:
    """Outer steps of a bilevel problem, one at a time, on workers that are not equal.

    Arguments as of `hetjax.fit_bilevel`.
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        problem: Bilevel,
        x: types.PyTree,
        y: types.PyTree,
        estimator: machine.Estimator,
        optimizer: optax.GradientTransformation,
        *,
        frozen: types.PyTree = (),
        **fields: Any,
    ) -> None:
        with named_lib.scope(types.Named(frozen)):
            found = setup.build(problem, x, y, estimator, optimizer, **fields)
        self.levels, self._stepping, self.x, self.y0 = found
        self.lower = self.levels[LOWER]
        self.setup = self.lower.run.setup  # both levels have the same workers
        self.problem, self.estimator = problem, estimator
        self.optimizer = self._stepping.optimizer
        self.cost = machine.cost(self._stepping.program)
        self._y_rows: types.PyTree = None
        self._gossips = self.setup.methods.reducer.mixing is not None
        if not self.setup.company.communicator.alone:
            agreement.check_same_parts(self.digests)

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Of what both levels have in common, beside the configuration."""
        return {
            "optimizer": extra_arguments.digest(self.optimizer, self.x),
            "estimator": digests.of_programs((machine.whole(self.estimator), (self.x, self.y0))),
        }

    def __enter__(self) -> "BilevelRun":
        self.lower.run.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.levels[UPPER].run.__exit__(kind, error, trace)  # a guest of the other
        self.lower.run.__exit__(kind, error, trace)

    @jax.transfer_guard("allow")
    def init(self) -> BilevelState:
        """The state before the first outer step; compiles the first kind of round of each level."""
        x = self._placed(self.x)
        opt = self._placed(jax.tree.map(np.asarray, self.optimizer.init(self.x)))
        if (text := judged.told(x, opt)) and self.setup.where.leads:
            logger.info(text)
        return BilevelState(x, opt, None, self.levels[UPPER].init(), self.lower.init(), 0)

    def _placed(self, tree: types.PyTree) -> types.PyTree:
        rows = mesh.add_worker_axis(tree, self.lower.run.num_workers)
        return mesh.place(rows, self.setup.where.mesh)

    def kept_shapes(self) -> machine.State:
        """The shapes of what the estimator keeps, leaves `[W, ...]`; computes nothing."""

        def kept(x: types.PyTree, y: types.PyTree) -> machine.State:
            return self.estimator.end(self.estimator.begin(x, y, None)).state

        shapes = jax.eval_shape(kept, self.x, self.y0)
        num = self.lower.run.num_workers
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((num, *s.shape), s.dtype), shapes)

    def params(self, state: BilevelState, x: types.PyTree | None = None) -> dict[str, types.PyTree]:
        """x, and the lower variable y that was reached, on the host; all processes call it.

        Args:
            state: whose they are.
            x: the one that y was reached at, of the workers; None: the state's, where it is judged.
        """
        y = self.y0 if state.kept is None else self.read(state.kept.y)
        point = judged.of(state.x, state.opt) if x is None else x
        return {"x": per_example.plain(self.read(point)), "y": y}

    @jax.transfer_guard("allow")
    def step(
        self, state: BilevelState, *, asks: Callable[[], allgather_work.Request] = _nothing
    ) -> tuple[BilevelState, OuterStep]:
        """One outer step: all requests of a hypergradient, each as a round, and the update of x.

        Args:
            state: from `init` or the step before; it is spent.
            asks: called before each round: what this process asks of all of them.

        Raises:
            NonFiniteError: a microbatch was not finite; names the request and the examples.
        """
        if self._y_rows is None:
            self._y_rows = self._placed(self.y0)
        for each in self.levels.values():
            each.begin_step()
        levels = {  # a step that fails leaves the visits of the one before
            name: at._replace(revisits=at.revisits.copy()) for name, at in state.levels.items()
        }
        rounds: list[Answered] = []
        carry, left, asked = self._stepping.begin(state.x, self._y_rows, state.kept)
        while asked is not None:
            request = asks()
            ask = machine.next_ask(left)
            what, own = ask.what, self.levels[ask.what.level]
            if rounds:  # it is over when the next one begins, whichever level that is of
                rounds[-1].report.end(time.perf_counter())
            batch = 0 if what.is_new else int(stepping.first(asked.batch))
            levels[what.level], sums, report = own.answer(
                levels[what.level], what, asked.point, batch, request=request
            )
            active = self._active(levels)
            sent = own.bytes_sent(what) + self._stepping.mixed_bytes(ask.moves, carry, active)
            rounds.append(Answered(what, report, sent))
            did = own.did(report) if self._gossips else ()
            carry, left, asked = self._stepping.receive(carry, left, sums, active, did)
        x, opt, kept, info = self._stepping.end(
            carry,
            state.x,
            state.opt,
            self._placed(np.float32(state.steps_done)),
            self._active(levels),
            self._did(rounds) if self._gossips else (),
        )
        for each in self.levels.values():
            each.check()
        sent = self._stepping.own_bytes(self.x, self.lower.run.num_workers)
        sent += sum(each.bytes_sent for each in rounds)
        new = BilevelState(x, opt, kept, levels[UPPER], levels[LOWER], state.steps_done + 1)
        return new, OuterStep(info, rounds, sent)

    def _did(self, rounds: list[Answered]) -> jax.Array:
        """Which workers did something in an outer step: it decides whether they move."""
        done = sum(asked.report.done.quotas for asked in rounds)
        return mesh.place(np.asarray(done, np.float32), self.setup.where.mesh)

    def _active(self, levels: dict[str, level.LevelState]) -> Any:
        """The exchanges of the round that is done, of a reducer that gossips."""
        rounds_done = sum(each.rounds.rounds_done for each in levels.values())
        return self.setup.methods.reducer.active(rounds_done)

    def settle(self) -> None:
        """Waits for the last round of each level; call it before a pause."""
        for each in self.levels.values():
            each.run.settle()

    def own_row(self, rows: types.PyTree) -> types.PyTree:
        """This process's first worker's, on the host."""
        with blocking_waits.Wait("synchronise", is_vain=False):  # as of `Engine.settle`
            return jax.device_get(mesh.own_row(rows))

    def own_mean(self, rows: types.PyTree) -> types.PyTree:
        """As `read`, of only this process's workers: no other process takes part."""
        return state_lib.own_mean(rows) if self._gossips else self.own_row(rows)

    def read(self, rows: types.PyTree) -> types.PyTree:
        """One copy of what all workers have, on the host; the mean where they gossip.

        All processes call it.
        """
        if not self._gossips:
            return self.own_row(rows)
        return state_lib.mean_of_rows(state_lib.all_rows(rows))
