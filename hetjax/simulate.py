"""How long would rounds take on a cluster that is not there?

The quota policies, the solver and the gates are those of training. Compute times are an emulated
cluster's, communication follows a model of the links, and no gradient is computed. So a run of
100,000 workers takes a laptop seconds. It needs only NumPy.

Assumes that compute does not depend on the examples, and that links are equal and do not disturb
each other. Assumes that policies know the times of a round when the next one begins, and that no
epoch ends: every round is of the whole budget.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hetjax import gates, parts, topology
from hetjax.cluster import emulate
from hetjax.config import kinds
from hetjax.quota import policies
from hetjax.report import words
from hetjax.topology import links

WAIT_FOR = ("all", "neighbours")
EXACT_WORKERS = 64  # up to so many workers the delays are exactly those of a training run
_MOST_TIMES = 1 << 26  # microbatch times of a round: 0.5 GiB, a few times over
_STREAM = 0x73696D  # keeps the delays apart from other draws of (seed, round)


class Round(NamedTuple):
    """What the workers did in one round."""

    round: int
    present: np.ndarray  # bool[n]
    quotas: np.ndarray  # i64[n], microbatches
    microbatches_done: np.ndarray  # i64[n]
    compute_secs: np.ndarray  # f64[n], each worker's own
    local_secs: np.ndarray  # f64[n], from its start to its exchange's: compute and waiting
    exchange_secs: np.ndarray  # f64[n]
    copies_sent: np.ndarray  # f64[n], of the parameters


class Simulation(NamedTuple):
    """A number for each of R rounds, and sums for each of n workers."""

    round_secs: np.ndarray  # f64[R], mean over the workers: local_secs + exchange_secs
    local_secs: np.ndarray  # f64[R], mean over the workers: compute and waiting
    exchange_secs: np.ndarray  # f64[R], mean over the workers
    elapsed_secs: np.ndarray  # f64[R], until the last worker has ended the round
    waiting_fraction: np.ndarray  # f64[R], of the present workers' local_secs
    bytes_sent: np.ndarray  # i64[R], by all workers
    microbatches_done: np.ndarray  # i64[R], by all workers
    quota_range: np.ndarray  # i64[R, 2], least and most of the present workers
    done_range: np.ndarray  # i64[R, 2], least and most of the present workers
    worker_microbatches: np.ndarray  # i64[n], over all rounds
    worker_compute_secs: np.ndarray  # f64[n], over all rounds

    @property
    def microbatches_per_sec(self) -> float:
        """Microbatches a second over the whole run."""
        return float(self.microbatches_done.sum() / self.elapsed_secs[-1])

    def __repr__(self) -> str:
        return f"Simulation\n{words.aligned(self._rows())}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the rounds' times, waiting, and what each worker did."""
        from hetjax.report import cards, over_rounds

        drawn = self.round_secs, self.waiting_fraction, self.worker_microbatches
        pictures = over_rounds.draw_simulation(*drawn, width=cards.WIDTH)
        return cards.card("Simulation", self._rows(), pictures)

    def _rows(self) -> list[tuple[str, str]]:
        waited = float(self.waiting_fraction @ self.local_secs)
        done = self.worker_microbatches
        return [
            ("rounds", f"{len(self.round_secs):,} of {len(done):,} workers"),
            ("time", f"{words.time(self.elapsed_secs[-1])} until the last worker has ended"),
            ("mean round", words.time(self.round_secs.mean())),
            ("of it the exchange", words.time(self.exchange_secs.mean())),
            ("waiting", f"{words.percent(waited / self.local_secs.sum())} of the workers' time"),
            ("microbatches", f"{done.sum():,}, {self.microbatches_per_sec:.4g} a second"),
            ("of a worker", f"{done.min():,} to {done.max():,}"),
            ("sent", words.size(int(self.bytes_sent.sum()))),
        ]


def simulate(
    quota: Any,
    cluster: Any,
    *,
    budget: int,
    num_rounds: int,
    caps: ArrayLike | None = None,
    gate: Any = "none",
    drop: bool = False,
    reducer: Any = "all_reduce",
    param_bytes: int = 0,
    link: links.LinkModel = links.LinkModel(),  # noqa: B008
    wait_for: str = "all",
    on_round: Callable[[Round], None] | None = None,
) -> Simulation:
    """Rounds of training without the training.

    If all wait, a round lasts until its last worker has finished what the gate asks for, plus the
    exchange. With n workers, s bytes of parameters, latency l, b bytes a second, that takes:

        all_reduce, ring    2(n - 1)·l + 2(n - 1)/n · s/b
        d_psgd              most neighbours of a worker · (l + s/b), 1 for one-peer graphs
        matcha              active matchings · (l + s/b)

    If workers wait for neighbours, each has a clock of its own. It begins the next round when it
    and those it receives from in this round have finished their work, and its own exchanges, one
    after another, are done. Absent workers compute nothing and are mixed, as in training.

    Args:
      quota: the policy that decides the quotas: a `QuotaPolicy`, a name, or a dict of fields, such
        as `{"policy": "static", "proportions": [2, 1]}`.
      cluster: decides the times, and which workers are present: an `EmulatedCluster`, or its fields
        as a dict, as `fit` takes them. Up to 64 workers a run has the delays of a training run with
        the same seed; above, others of the same distributions.
      budget: microbatches a round.
      num_rounds: R.
      caps: i64[n], the most a present worker may get. None: the budget.
      gate: a `Gate`, a name, or a dict such as `{"trigger": "quorum", "quorum": 12}`. If workers
        wait for neighbours, 'deadline' is on each worker's own clock.
      drop: give up what is in flight when the gate closes, instead of finishing it.
      reducer: a `Reducer`, a name, or a dict such as `{"name": "d_psgd", "graph": "torus"}`. An
        object keeps the schedule that it has planned. With 'matcha' and 1000 workers planning takes
        longer than the rounds, so give the same object to several runs.
      param_bytes: of one copy of the parameters.
      link: of every worker.
      wait_for: 'all', or 'neighbours' with reducers that gossip.
      on_round: called after each round, with what each worker did.

    Returns:
      A `Simulation`.

    Raises:
      ValueError: an argument is wrong, two do not fit together, or a round would take more
        memory than is reasonable.

    Example:
      >>> cluster = emulate.EmulatedCluster((1.0, 1.0, 1.0, 4.0))
      >>> blocking = simulate("equal", cluster, budget=32, num_rounds=5)
      >>> first = simulate("equal", cluster, budget=32, num_rounds=5, gate="first")
      >>> blocking.round_secs[0], first.round_secs[0], first.microbatches_done[0]
      (np.float64(32.0), np.float64(8.0), np.int64(26))

    References:
      He, Dube, "Accelerating parallel stochastic gradient descent via non-blocking mini-batches",
      2022, arXiv 2211.00889: the rounds that a gate closes.
    """
    cluster = emulate.as_cluster(cluster)
    policy, num_workers = kinds.resolve("quota", quota), cluster.num_workers
    parts.integer(at_least=1).check("budget", budget)
    parts.integer(at_least=1).check("num_rounds", num_rounds)
    limits = np.full(num_workers, int(budget)) if caps is None else np.asarray(caps)
    if limits.shape != (num_workers,) or limits.dtype.kind not in "iu":
        raise ValueError(
            f"caps are {limits.dtype}{list(limits.shape)}, must be {num_workers} integers, or None"
        )
    closes = kinds.resolve("gate", gate)
    if wrong := list(closes.problems(parts.Facts(num_workers, int(budget)))):
        raise ValueError("\n".join(f"gate.{line}" for line in wrong))
    exchanging = kinds.resolve("reducer", reducer)
    network = _network(exchanging, cluster, param_bytes, link)
    parts.choice(*WAIT_FOR).check("wait_for", wait_for)
    if wait_for == "neighbours" and not exchanging.gossips:
        raise ValueError(
            f"wait_for: 'neighbours' does not go with {kinds.name_of('reducer', exchanging)!r}, "
            "which needs every worker"
        )
    if wait_for == "neighbours" and closes.needs_news:
        raise ValueError(
            f"wait_for: 'neighbours' does not go with {kinds.name_of('gate', closes)!r}, which "
            "needs news from every worker"
        )
    state = policy.init(num_workers, int(budget))
    clocks = np.zeros(num_workers)
    lines = []
    worker_microbatches, worker_compute_secs = np.zeros(num_workers, np.int64), clocks.copy()
    for index in range(int(num_rounds)):
        present = emulate.presence(cluster, index)
        quotas, state = policies.assigned(policy, state, int(budget), np.where(present, limits, 0))
        ends = microbatch_ends(cluster, index, quotas)
        closing = gates.close(closes, ends, quotas, drop=drop)
        done, compute_secs = closing.microbatches_done, closing.compute_secs
        first_secs = np.where(done > 0, ends[:, 0], np.nan)
        state = policy.observe(state, policies.RoundTimes(done, first_secs, compute_secs, present))
        exchange = network(index)
        if wait_for == "all":
            local_secs = np.broadcast_to(closing.round_secs, num_workers)
            exchange_secs = np.broadcast_to(exchange.secs, num_workers)
        else:
            local_secs = exchange.latest(clocks + compute_secs) - clocks
            exchange_secs = exchange.own_secs
        clocks = clocks + local_secs + exchange_secs
        secs = compute_secs, local_secs, exchange_secs
        done_now = Round(index, present, quotas, done, *secs, exchange.copies_sent)
        lines.append(_line(done_now, float(clocks.max()), param_bytes))
        worker_microbatches += done
        worker_compute_secs += compute_secs
        if on_round is not None:
            on_round(done_now)
    columns = [np.array(column) for column in zip(*lines, strict=True)]
    return Simulation._make([*columns, worker_microbatches, worker_compute_secs])


def microbatch_ends(cluster: emulate.EmulatedCluster, round: int, quotas: np.ndarray) -> np.ndarray:
    """Returns when each microbatch of each worker would end, seconds from the round's start.

    Up to 64 workers these are `cluster.microbatch_ends`. Above, a generator for each worker would
    take most of the time. So one for each round draws from the same distributions; constant times
    are equal to the bit. Larger quotas do not change the times of the earlier microbatches.

    Args:
      cluster: the workers.
      round: the round.
      quotas: i64[n].

    Returns:
      f64[n, max(max(quotas), 1)]; values beyond a quota mean nothing.

    Raises:
      ValueError: there would be more than 2^26 times.
    """
    num_workers, most = cluster.num_workers, max(int(quotas.max()), 1)
    if num_workers * most > _MOST_TIMES:
        raise ValueError(
            f"round {round} has a quota of {most}, so {num_workers} x {most} times; at most "
            f"{_MOST_TIMES} are held. Give caps or a smaller budget"
        )
    if num_workers <= EXACT_WORKERS:
        return emulate.ends_of(cluster, round, quotas)
    return cluster.ends(round, slice(None), most, seed=(cluster.seed, round, _STREAM)).T


def _line(done: Round, elapsed_secs: float, param_bytes: int) -> tuple:
    """A round's numbers, in the order of `Simulation`."""
    here, counts = done.present, done.microbatches_done[done.present]
    local_secs, exchange_secs = _mean(done.local_secs), _mean(done.exchange_secs)
    present_secs = float(done.local_secs[here].mean())
    waiting_secs = float((done.local_secs - done.compute_secs)[here].mean())
    return (
        local_secs + exchange_secs,
        local_secs,
        exchange_secs,
        elapsed_secs,
        waiting_secs / present_secs if present_secs > 0 else 0.0,
        round(done.copies_sent.sum() * param_bytes),
        done.microbatches_done.sum(),
        (done.quotas[here].min(), done.quotas[here].max()),
        (counts.min(), counts.max()),
    )


def _mean(secs: np.ndarray) -> float:
    """The mean, exact if all are equal, which a sum over n is not."""
    return float(secs[0] + (secs - secs[0]).mean())


def _network(
    reducer: topology.Reducer,
    cluster: emulate.EmulatedCluster,
    param_bytes: float,
    link: links.LinkModel,
) -> links.Network:
    name, num_workers = kinds.name_of("reducer", reducer), cluster.num_workers
    parts.number(at_least=0.0).check("param_bytes", param_bytes)
    if reducer.most_workers is not None and num_workers > reducer.most_workers:
        raise ValueError(
            f"reducer: {name!r} is of at most {reducer.most_workers} workers, got "
            f"{num_workers}; take d_psgd"
        )
    if reducer.network is None:
        raise ValueError(f"reducer: {name!r} has no network, so its cost on links is not known")
    return reducer.network(topology.RunFacts(num_workers, cluster.seed), param_bytes, link)
