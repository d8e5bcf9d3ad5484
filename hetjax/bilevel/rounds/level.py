"""A level of a bilevel problem: a source, its order and ledger, and rounds that answer requests.

A request for a new batch takes the microbatches that come next in the level's order, and the ledger
counts their examples. A request for a batch that is held takes those of an earlier round of the
same hypergradient once more, cut among the workers as their speeds are now. It counts as a revisit.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax import mesh, trees
from hetjax.bilevel.problem import Bilevel, Kind, What
from hetjax.bilevel.rounds import rules
from hetjax.data import sources, stream
from hetjax.local import rules as rules_lib
from hetjax.losses import loss as losses_lib
from hetjax.rounds import engine, round_report, run_state, sync, warm_up
from hetjax.rounds import setup as setup_lib


class LevelState(NamedTuple):
    """A level between two rounds."""

    rounds: run_state.RoundsState
    revisits: np.ndarray  # i64[N]: how often each example was in a batch that was held


class Level:
    """One level.

    Args:
        name: 'upper' or 'lower'.
        problem: its losses are of one number an example.
        source: checked.
        point: where the first request is made; tells shapes.
        whats: of this level, each once.
        gossips: whether each worker keeps its own sums.
        **options: of the `Run`.

    Raises:
        ValueError: what a `Run` refuses.
    """

    def __init__(
        self,
        name: str,
        problem: Bilevel,
        source: Any,
        point: rules.Point,
        whats: list[What],
        *,
        gossips: bool,
        **options: Any,
    ) -> None:
        self.name, self.source = name, source
        self.loss_fn = rules.tried_loss(problem, name)
        example = sources.fetch(source, np.arange(1))
        losses_lib.check_loss(self.loss_fn, point, example, jax.random.key(0))
        made = {
            what: rules.answering(
                problem,
                what,
                gossips=gossips,
                depends=rules.depends(problem, what, point, example),
                of_shards=_weighting(options) == "shard_mean",
            )
            for what in whats
        }
        first, *others = whats
        self.kind_of = {first: setup_lib.MAIN} | {what: kind_name(what) for what in others}
        self._bytes = {  # of sums: all but the part that belongs to one example each
            what: trees.num_bytes(rules_lib.contribution_shapes(rule, point))
            for what, rule in made.items()
        }
        self.run = engine.Engine(
            self.loss_fn,
            point,
            source,
            rule=made[first],
            rules={self.kind_of[what]: made[what] for what in others},
            **options,
        )
        self._held: list[stream.Assignment] = []  # of this hypergradient, by number
        self._last: tuple[What, round_report.Report] | None = None  # that is not checked yet

    def init(self) -> LevelState:
        """Before the first round; compiles what the level's first kind of round needs."""
        rounds = self.run.begin()
        with self.run.begins.stage("compiling"):
            warm_up.of_sums(self.run, rounds, self.run.setup.begun.params, setup_lib.MAIN, ())
        return LevelState(rounds, np.zeros(self.run.setup.stream.num_examples, np.int64))

    def begin_step(self) -> None:
        """A new hypergradient begins: the batches of the last one are given up."""
        self._held = []

    def answer(
        self, state: LevelState, what: What, point: rules.Point, batch: int, **options: Any
    ) -> tuple[LevelState, sync.Synchronised, round_report.Report]:
        """One round; its `mean` and `own` answer the request.

        Args:
            state: spent.
            what: that is asked for.
            point: where; leaves `[W, ...]`.
            batch: its number, where it is held.
            **options: of `Engine.sum`.

        Raises:
            NonFiniteError: of the round before, with its request.
        """
        again = None if what.is_new else self._held[batch]
        kind = self.kind_of[_bare(what)]
        with self._naming():
            rounds, sums, report = self.run.sum(
                state.rounds, point, kind=kind, again=again, **options
            )
            self._check_weight()
        if again is None:
            self._held.append(report.done)
        else:
            ids = again.example_ids
            np.add.at(state.revisits, ids[ids >= 0], 1)
        self._last = what, report
        return LevelState(rounds, state.revisits), sums, report

    def did(self, report: round_report.Report) -> Any:
        """By what a worker's own loss is multiplied, so that their mean is that of the round.

        f32[W]; 0 of a worker that did nothing. A gossiping worker divides by the share that all
        have, and here are those that did something.
        """
        setup = self.run.setup
        did = report.done.quotas > 0
        by_example = setup.config.data.weighting == "example"
        present = 1.0 if by_example else (setup.stream.shares * did).sum()
        return mesh.place(np.asarray(did / max(present, 1e-9), np.float32), setup.where.mesh)

    def check(self) -> None:
        """Waits for the last round.

        Raises:
            NonFiniteError: a microbatch of it was not finite; names its request.
        """
        if self._last is not None:
            with self._naming():
                self._last[1].check()
                self._check_weight()

    def _check_weight(self) -> None:
        """Refuses the round before, whose sums are on the host, where it has no mean."""
        if self._last is not None and (total := self._last[1].divisor) <= 0:
            raise round_report.NonFiniteError(
                f"the weights of the batch add up to {total:g}, so there is no mean"
            )

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """What was not finite was the round before."""
        try:
            yield
        except round_report.NonFiniteError as error:
            assert self._last is not None
            what = self._last[0]
            batch = "a new batch" if what.is_new else "a batch that is held"
            raise round_report.NonFiniteError(
                f"{kind_name(what)} on {batch} of the {self.name} level: {error}"
            ) from error

    def bytes_sent(self, what: What) -> float:
        """By all workers for the sums of one request, as the reducer counts them."""
        reducer = self.run.setup.methods.reducer
        if reducer.mixing is not None:
            return 0.0
        return reducer.copies_sent(()) * self._bytes[_bare(what)]

    def counted(self, state: LevelState) -> dict[str, int]:
        """What the ledger says."""
        own = state.rounds.stream
        return {
            **self.run.setup.stream.counted(own),
            "examples_dropped": self.run.setup.stream.dropped(own),
            "examples_revisited": int(state.revisits.sum()),
        }


def _weighting(options: Mapping[str, Any]) -> str:
    """What is minimised, as the fields say it; the run refuses what is wrong with them."""
    data = options.get("data")
    return data.get("weighting", "") if isinstance(data, Mapping) else ""


def _bare(what: What) -> What:
    """Without whether its batch is new: the same sums are asked for."""
    return what._replace(is_new=False)


def bare(whats: list[What], level: str) -> list[What]:
    """The kinds of sums that are asked of a level, each once, in order; a loss if there is none."""
    found = dict.fromkeys(_bare(what) for what in whats if what.level == level)
    return list(found) or [What(Kind.LOSS, level)]


def kind_name(what: What) -> str:
    """Of a kind of round."""
    if what.kind is Kind.LOSS:
        return "loss"
    if what.kind is Kind.TANGENTS:
        return f"gradient with {what.num_tangents} tangents"
    name = "gradient" if what.kind is Kind.GRADIENT else "product"
    return f"{name} in {' and '.join(what.wrt)}"
