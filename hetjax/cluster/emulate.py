"""How long would a worker of such a cluster have computed?

A cluster describes unequal workers: seconds a microbatch, overhead, noise, a script of changes. It
gives the time of every microbatch as a pure function of (seed, round, worker). The training loop
sleeps until those times; the virtual clock only adds them up. Assumes nothing of the model that is
trained, and leaves the synchronisation out: the times are a worker's own.
"""

import bisect
import dataclasses
import functools
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from hetjax import parts
from hetjax.quota import policies, solver

DELAYS = ("constant", "exponential", "gamma", "shifted_exponential")
DELAY_PER = ("microbatch", "round")


@dataclasses.dataclass(frozen=True)
class Change:
    """From a round on, a worker has other speeds, comes or leaves, until it is changed again.

    Args:
      round: the first round that sees the change, ≥ 0.
      worker: the worker that changes.
      secs_per_microbatch: the new mean seconds of a microbatch. None: as before.
      overhead_secs: the new mean seconds of a round beside its microbatches. None: as before.
      present: whether the worker is there at all. None: as before.
    """

    round: Annotated[int, parts.integer()]
    worker: Annotated[int, parts.integer()]
    secs_per_microbatch: Annotated[float | None, parts.number(above=0.0)] = None
    overhead_secs: Annotated[float | None, parts.number(at_least=0.0)] = None
    present: Annotated[bool | None, parts.flag()] = None


@dataclasses.dataclass(frozen=True)
class EmulatedCluster:
    """Workers of given speeds, whose times a seed decides.

    Args:
      secs_per_microbatch: mean seconds of a microbatch of each worker, > 0.
      overhead_secs: mean seconds of a round beside its microbatches, ≥ 0, for each worker or
        one number for all.
      delay: how the times vary about their means: "constant", "exponential", "gamma" or
        "shifted_exponential". The last is half of each mean and an exponential delay whose mean is
        the other half, as of a worker that is held up now and then.
      delay_cv: standard deviation over mean of a time under "gamma", > 0.
      delay_per: "microbatch": every microbatch and the overhead have a factor of their own;
        "round": one factor for all that a worker does in a round.
      changes: the script. Of two for one worker and round the later in the tuple counts.
      seed: of all random times.

    Raises:
      ValueError: a time, a worker or a round is out of range, or a name is not known.

    Example:
      >>> slower = Change(round=5, worker=0, secs_per_microbatch=3.0)
      >>> cluster = EmulatedCluster((1.0, 2.0), changes=(slower,))
      >>> cluster.microbatch_ends(4, 0, 2).tolist(), cluster.microbatch_ends(5, 0, 2).tolist()
      ([1.0, 2.0], [3.0, 6.0])
    """

    secs_per_microbatch: tuple[float, ...]
    overhead_secs: tuple[float, ...] | float = 0.0
    delay: str = "constant"
    delay_cv: float = 0.1
    delay_per: str = "microbatch"
    changes: tuple[Change, ...] = ()
    seed: int = 0

    def __post_init__(self):
        secs = tuple(float(x) for x in np.atleast_1d(self.secs_per_microbatch))
        given = self.overhead_secs
        overhead = given if np.isscalar(given) else tuple(float(x) for x in np.asarray(given))
        object.__setattr__(self, "secs_per_microbatch", secs)
        object.__setattr__(self, "overhead_secs", overhead)
        object.__setattr__(self, "changes", tuple(self.changes))
        parts.choice(*DELAYS).check("delay", self.delay)
        parts.choice(*DELAY_PER).check("delay_per", self.delay_per)
        parts.number(above=0.0).check("delay_cv", self.delay_cv)
        for change in self.changes:
            _check_change(change, len(secs))
        solver.WorkerCosts(overhead, secs)  # checks them

    @functools.cached_property
    def _segments(self) -> list[tuple[int, solver.WorkerCosts, np.ndarray]]:
        """From which round on there are which costs, and which workers are present."""
        costs = solver.WorkerCosts(self.overhead_secs, self.secs_per_microbatch)
        present = np.ones(costs.num_workers, bool)
        segments = [(0, costs, present)]
        for change in sorted(self.changes, key=lambda change: change.round):
            overhead, secs = costs.overhead_secs.copy(), costs.secs_per_microbatch.copy()
            present = present.copy()
            given = change.overhead_secs, change.secs_per_microbatch, change.present
            for of_workers, value in zip((overhead, secs, present), given, strict=True):
                if value is not None:
                    of_workers[change.worker] = value
            costs = solver.WorkerCosts(overhead, secs)
            segments.append((change.round, costs, present))
        return segments

    def _segment(self, round: int) -> tuple[int, solver.WorkerCosts, np.ndarray]:
        return self._segments[bisect.bisect_right(self._segments, round, key=lambda s: s[0]) - 1]

    @property
    def num_workers(self) -> int:
        """The number of workers, present or not."""
        return len(self.secs_per_microbatch)

    def costs_at(self, round: int) -> solver.WorkerCosts:
        """Returns the true mean costs in a round."""
        return self._segment(round)[1]

    def present_at(self, round: int) -> np.ndarray:
        """Returns which workers are there in a round, bool[num_workers]."""
        return self._segment(round)[2].copy()

    def microbatch_ends(self, round: int, worker: int, count: int) -> np.ndarray:
        """Returns when each microbatch of a worker ends, seconds from the round's start.

        Args:
          round: the round.
          worker: the worker.
          count: microbatches; more of them do not change the times of the earlier ones.

        Returns:
          f64[count]; the overhead lies before the end of the first.
        """
        workers = slice(worker, worker + 1)
        return self.ends(round, workers, count, seed=(self.seed, round, worker))[:, 0]

    def ends(self, round: int, workers: slice, count: int, *, seed: tuple[int, ...]) -> np.ndarray:
        """As `microbatch_ends` of several workers, f64[count, k]; `seed` is that of the factors."""
        costs = self.costs_at(round)
        overhead = costs.overhead_secs[workers]
        ends = np.full((count, len(overhead)), costs.secs_per_microbatch[workers])
        rng = None if self.delay == "constant" else np.random.default_rng(seed)
        if rng is not None and self.delay_per == "microbatch":
            # Microbatch by microbatch, so one more is drawn after all the others.
            factors = self.factors(rng, (count + 1) * len(overhead)).reshape(count + 1, -1)
            overhead = overhead * factors[0]
            ends *= factors[1:]
        ends[:1] += overhead
        np.cumsum(ends, axis=0, out=ends)
        if rng is not None and self.delay_per == "round":
            ends *= self.factors(rng, len(overhead))
        return ends

    def factors(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws f64[count], the factors of `delay` on mean times; not for "constant"."""
        if self.delay == "exponential":
            return rng.standard_exponential(count)
        if self.delay == "shifted_exponential":
            return 0.5 * (1.0 + rng.standard_exponential(count))
        shape = self.delay_cv**-2
        return rng.standard_gamma(shape, count) / shape


def as_cluster(given: Any) -> Any:
    """A cluster from the dict of fields that `hetjax.fit` takes; anything else as it is.

    Args:
      given: the fields of an `EmulatedCluster`, changes as dicts or `Change`s. `num_workers` and
        `clock` may be there and mean nothing here.

    Raises:
      ValueError: a field is not known, or there are no speeds.

    Example:
      >>> as_cluster({"secs_per_microbatch": (1.0, 2.0), "clock": "virtual"}).num_workers
      2
    """
    if not isinstance(given, dict):
        return given
    known = parts.choice(*(field.name for field in dataclasses.fields(EmulatedCluster)))
    fields = {name: value for name, value in given.items() if name not in ("num_workers", "clock")}
    for name in fields:
        known.check("a field of cluster", name)
    if not np.size(fields.get("secs_per_microbatch", ())):
        raise ValueError(
            "cluster: it has no secs_per_microbatch, such as {'secs_per_microbatch': (0.04, 0.06)}"
        )
    changes = fields.pop("changes", ())
    made = tuple(each if isinstance(each, Change) else Change(**each) for each in changes)
    return EmulatedCluster(**fields, changes=made)


def simulate_policy(
    policy: policies.QuotaPolicy,
    cluster: EmulatedCluster,
    budget: int,
    num_rounds: int,
    caps: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs a policy on the cluster's virtual clock: no sleeping, no training.

    A round lasts until its slowest worker has done its quota; synchronisation takes no time.

    Args:
      policy: decides the quotas.
      cluster: decides the times, and which workers are present.
      budget: microbatches a round.
      num_rounds: rounds to run.
      caps: i64[n], the most a present worker may get. None: the budget.

    Returns:
      quotas i64[num_rounds, n], compute_secs f64[num_rounds, n], round_secs f64[num_rounds].

    Raises:
      ValueError: the policy assigns what no worker can do, or the cluster tells no times.

    Example:
      >>> cluster = EmulatedCluster((1.0, 3.0))
      >>> _, _, round_secs = simulate_policy(policies.equal(), cluster, 8, 2)
      >>> round_secs.tolist()
      [12.0, 12.0]
    """
    num_workers = cluster.num_workers
    limits = np.full(num_workers, budget) if caps is None else np.asarray(caps)
    quotas = np.zeros((num_rounds, num_workers), np.int64)
    compute_secs = np.zeros((num_rounds, num_workers))
    state = policy.init(num_workers, budget)
    for round in range(num_rounds):
        present = presence(cluster, round)
        counts, state = policies.assigned(policy, state, budget, np.where(present, limits, 0))
        ends, busy = ends_of(cluster, round, counts), counts > 0
        last = np.take_along_axis(ends, np.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        quotas[round], compute_secs[round] = counts, np.where(busy, last, 0.0)
        first_secs = np.where(busy, ends[:, 0], np.nan)
        times = policies.RoundTimes(counts, first_secs, compute_secs[round], present)
        state = policy.observe(state, times)
    return quotas, compute_secs, compute_secs.max(axis=1, initial=0.0)


def presence(cluster: EmulatedCluster, round: int) -> np.ndarray:
    """Which workers are there in a round, bool[n]; checks the answer of any user's cluster.

    Raises:
      ValueError: the cluster's answer is no such array.
    """
    said = parts.array_of(cluster.present_at(round))
    if said.shape == (cluster.num_workers,) and said.dtype == np.bool_:
        return said
    raise ValueError(
        f"cluster {type(cluster).__name__}: present_at({round}) returned {parts.shown(said)}; it "
        f"must return bool[{cluster.num_workers}]"
    )


def ends_of(cluster: EmulatedCluster, round: int, quotas: np.ndarray) -> np.ndarray:
    """When each microbatch of a round ends; checks the answers of any user's cluster.

    Args:
      cluster: the workers.
      round: the round.
      quotas: i64[n].

    Returns:
      f64[n, max(max(quotas), 1)], seconds from the round's start; infinite beyond a quota.

    Raises:
      ValueError: the times of a worker are no such times.
    """
    ends = np.full((len(quotas), max(int(quotas.max(initial=0)), 1)), np.inf)
    for worker in np.flatnonzero(quotas).tolist():
        count = int(quotas[worker])
        said = parts.array_of(cluster.microbatch_ends(round, worker, count))
        is_right = said.shape == (count,) and said.dtype.kind in "fiu" and np.isfinite(said).all()
        if not (is_right and said[0] >= 0 and (np.diff(said) >= 0).all()):
            raise ValueError(
                f"cluster {type(cluster).__name__}: microbatch_ends({round}, {worker}, {count}) "
                f"returned {parts.shown(said)}; it must return f64[{count}], finite, ascending"
            )
        ends[worker, :count] = said
    return ends


def _check_change(change: Change, num_workers: int) -> None:
    for name, option in parts.options_of(Change).items():
        if (value := getattr(change, name)) is not None:
            option.check(f"{change}: {name}", value)
    if change.worker >= num_workers:
        raise ValueError(f"{change}: the worker must be 0 to {num_workers - 1}")
    if change.secs_per_microbatch is change.overhead_secs is change.present is None:
        raise ValueError(f"{change} changes nothing")
