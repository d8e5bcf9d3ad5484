"""Quotas from a fitted cost model, robust to noise and to changes of speed.

`estimate.py` fits what a round costs each worker, and `changes.py` says when a worker has changed.
`solver.py` finds the exact quotas for the costs. This module decides when they are worth moving to.
`adaptive.py` decides whether they are used, and which workers are probed.
"""

from typing import NamedTuple

import numpy as np

from hetjax.quota import changes, estimate, policies, shares, solver
from hetjax.quota import costs as costs_lib

_TRUSTED = 4.0  # an observation farther off, in standard deviations, counts as one so far off
_FEW = 8  # rounds before which nothing counts as an outlier
_CLIPPED = 6.0  # a score farther off counts as this
_COMMON = 3.0  # standard errors beyond which the median residual is a change of all workers
_WARMED = 0.8  # if a round takes less than this part of what the first ones say, they were cold
_LITTLE = 3  # most first rounds of a worker that may have been cold
_KEPT_IDLE = 2.0  # rounds as many as what was seen of a worker counts once it has quota 0
# Part of the round that quota 0 must save for a worker to get it, and at which it has it no more.
IDLE_GAINS = {"held": 0.05, "returning": 0.02}
_SOLVE_ROUNDS = 8  # between two solutions when settled: one costs the host 0.2 ms


class FittedState(NamedTuple):
    budget: int
    kept: np.ndarray  # i64[n], the quotas of full rounds; all 0: none yet
    caps: np.ndarray  # i64[n], of the last assign
    overhead_secs: np.ndarray  # f64[n], fitted; NaN: never seen
    secs_per_microbatch: np.ndarray  # f64[n], fitted; NaN: never seen
    samples: estimate.Samples  # since each worker's last change
    seen: np.ndarray  # i64[n], rounds in which it was seen since then
    watch: changes.Watch
    pace: float  # how many times slower than fitted all were in the last round; 1: not clearly
    settling: int  # rounds left in which every better solution is taken
    rounds: int  # observed

    @property
    def unknown(self) -> np.ndarray:
        """Workers that are present and were never seen, bool[n]."""
        return (self.caps > 0) & np.isnan(self.secs_per_microbatch)

    @property
    def ratios(self) -> np.ndarray:
        """Overhead over seconds a microbatch, f64[n]; 0 if never seen."""
        known = self.secs_per_microbatch > 0
        return np.where(known, self.overhead_secs, 0.0) / np.where(
            known, self.secs_per_microbatch, 1.0
        )

    @property
    def seen_little(self) -> np.ndarray:
        """Workers of which all rounds seen may have been cold, bool[n]."""
        return self.seen <= _LITTLE


class Options(NamedTuple):
    """The options of `adaptive.adaptive`."""

    settle_rounds: int
    min_gain: float
    confidence: float
    noise_weight: float
    probe_microbatches: int
    drift: float
    alarm: float


def fitted(options: Options) -> policies.QuotaPolicy:
    """Exact quotas for the costs that the workers' clocks have shown, without probes.

    Every round fits overhead and seconds a microbatch of each worker to all rounds since the
    worker last changed. It solves min max_i t_i(k_i)·(1 + noise_weight·cv_i) exactly, with cv_i the
    worker's relative noise. After the start, a change or a newcomer the solution is taken at once.
    Later it must save more than `min_gain` of the round and more than `confidence` standard errors
    of what it saves, so noise alone moves nothing. A worker never seen gets a few microbatches
    first. First rounds may be cold (memory, caches): up to three are forgotten if the next is
    faster. What most workers are clearly slower or faster by is no change of any of them: their
    quotas would be the same.

    References:
      Page, "Continuous inspection schemes", Biometrika 41, 1954: CUSUM.
    """

    def init(num_workers: int, budget: int) -> FittedState:
        policies.check_sizes(num_workers, budget)
        zeros = np.zeros(num_workers, np.int64)
        unknown = np.full(num_workers, np.nan)
        return FittedState(
            budget=budget,
            kept=zeros,
            caps=zeros,
            overhead_secs=unknown,
            secs_per_microbatch=unknown,
            samples=estimate.no_samples(num_workers),
            seen=zeros,
            watch=changes.init(num_workers),
            pace=1.0,
            settling=options.settle_rounds,
            rounds=0,
        )

    def assign(state: FittedState, total: int, caps: np.ndarray):
        caps = np.asarray(caps, np.int64)
        state = _admit(state, caps, options.settle_rounds)
        if _may_stay(state, total, caps):
            return state.kept.copy(), state
        costs = _inflated_costs(state, options.noise_weight)
        if state.unknown.any():
            probes = options.probe_microbatches
            return _with_newcomers(state, costs, total, caps, probes), state
        lowered = (state.kept > caps) & (caps > 0)  # for this round alone
        if total != state.budget or lowered.any():
            return solver.solve_quotas(costs, total, caps=caps, current=state.kept), state
        kept = solver.solve_with_all(costs, total, caps=caps, current=state.kept, **IDLE_GAINS)
        stays = shares.are_allowed(state.kept, total, caps)
        if stays and not _is_worth_it(options, state, costs, kept):
            kept = state.kept
        return kept.copy(), state._replace(kept=kept)

    def observe(state: FittedState, times: policies.RoundTimes) -> FittedState:
        done = np.asarray(times.microbatches_done, np.int64)
        busy = done > 0
        seen = busy & ~np.isnan(state.secs_per_microbatch)
        pace = _common_pace(state, done, times.compute_secs, seen & (state.kept > 0))
        secs = np.where(busy, times.compute_secs, 1.0) / pace
        first = np.where(done > 1, times.first_secs / pace, np.where(busy, secs, np.nan))
        idle = seen & (state.kept == 0) & (state.kept.sum() > 0)
        warmed = seen & (secs < _WARMED * _expected(state, done)) & (state.seen_little | idle)
        overhead, slope = state.overhead_secs, state.secs_per_microbatch
        # One microbatch a round tells no overhead, and one taken for none would never be given two.
        overhead = np.where(warmed, np.minimum(overhead, slope), overhead)
        if warmed.any():
            state, seen = _forget(state, warmed), seen & ~warmed
        state = _faded(state, idle)
        state, factors = _score(state, done, first, secs, seen, options.drift)
        new = estimate.samples_of(done, first * factors, secs * factors)
        samples = estimate.add(state.samples, new)
        changed, watch = changes.cut(state.watch, options.alarm)
        if changed.any():
            window = estimate.samples_of(watch.done, watch.first_secs, watch.compute_secs)
            since = estimate.Samples(*(field.sum(axis=1) for field in window))
            samples = estimate.choose(changed, since, samples)
        num_seen = np.where(changed, samples.start_count, state.seen + busy).astype(np.int64)
        overhead, slope = estimate.fit(samples, overhead, slope)
        return state._replace(
            overhead_secs=overhead,
            secs_per_microbatch=slope,
            samples=samples,
            seen=num_seen,
            watch=watch,
            pace=pace,
            settling=options.settle_rounds if changed.any() else max(state.settling - 1, 0),
            rounds=state.rounds + 1,
        )

    return policies.QuotaPolicy(init, assign, observe)


def _admit(state: FittedState, caps: np.ndarray, settle_rounds: int) -> FittedState:
    """Takes over the caps; workers that joined are as if never seen."""
    joined = (state.caps == 0) & (caps > 0)
    if ((caps > 0) != (state.caps > 0)).any():
        state = state._replace(settling=settle_rounds)
    if joined.any():
        state = _forget(state, joined)
    return state._replace(caps=caps)


def _forget(state: FittedState, workers: np.ndarray) -> FittedState:
    """The workers where bool[n] is true as if never seen."""
    unseen = estimate.no_samples(workers.size)
    return state._replace(
        overhead_secs=np.where(workers, np.nan, state.overhead_secs),
        secs_per_microbatch=np.where(workers, np.nan, state.secs_per_microbatch),
        samples=estimate.choose(workers, unseen, state.samples),
        seen=np.where(workers, 0, state.seen),
        watch=changes.forget(state.watch, workers),
    )


def _faded(state: FittedState, workers: np.ndarray) -> FittedState:
    """What is known of the workers where bool[n] is true counts as a few rounds at most.

    A worker of quota 0 is seen rarely. Rounds of long ago, such as those of a slow start, would
    decide for hundreds of rounds.
    """
    if not workers.any():
        return state
    rounds = np.maximum(state.samples.start_count, 1e-12)
    kept = np.where(workers, np.minimum(_KEPT_IDLE / rounds, 1.0), 1.0)
    return state._replace(samples=estimate.Samples(*(kept * field for field in state.samples)))


def _expected(state: FittedState, done: np.ndarray) -> np.ndarray:
    return state.overhead_secs + state.secs_per_microbatch * done


def _common_pace(
    state: FittedState, done: np.ndarray, compute_secs: np.ndarray, seen: np.ndarray
) -> float:
    """How many times slower than fitted all workers in `seen` are; 1 if that may be noise."""
    if np.count_nonzero(seen) < 2:
        return 1.0
    ratios = np.log(np.maximum(compute_secs[seen], 1e-12) / _expected(state, done)[seen])
    ordered, half = np.sort(ratios), ratios.size // 2
    low, high = float(ordered[(ratios.size - 1) // 2]), float(ordered[half])
    common = 0.0 if low * high <= 0 else min(low, high, key=abs)  # more than half are beyond it
    error = 1.25 * changes.median(changes.noise(state.watch)[seen]) / np.sqrt(ratios.size)
    return float(np.exp(common)) if abs(common) > _COMMON * error else 1.0


def _score(
    state: FittedState,
    done: np.ndarray,
    first: np.ndarray,
    secs: np.ndarray,
    seen: np.ndarray,
    drift: float,
) -> tuple[FittedState, np.ndarray]:
    """Watches a round. Also returns the factors f64[n] that bring outliers to what is trusted."""
    rounds = np.maximum(state.samples.start_count, 1.0)
    usual = state.samples.microbatches / rounds
    smaller = np.sqrt(np.maximum(usual / np.maximum(done, 1), 1.0))
    expected = np.where(seen, _expected(state, done), 1.0)
    ratios = np.where(seen, np.log(np.maximum(secs, 1e-12) / expected), 0.0)
    scales = smaller * np.sqrt(1.0 + 1.0 / rounds)
    # Workers seen as a favour may have recovered together, so they are no majority.
    usual_workers = seen & (state.kept > 0)
    residuals, deviations = changes.score(state.watch, ratios, scales, usual_workers)
    scores = np.where(seen, residuals / deviations, 0.0)
    trusted = np.where(rounds > _FEW, _TRUSTED, np.inf)
    factors = np.exp((np.clip(scores, -trusted, trusted) - scores) * deviations)
    watch = changes.learn_noise(state.watch, residuals / scales, deviations / scales, seen)
    clipped = np.clip(scores, -_CLIPPED, _CLIPPED)
    watch = changes.push(watch, done, first, secs, clipped, drift=drift)
    return state._replace(watch=watch), factors


def _inflated_costs(state: FittedState, noise_weight: float) -> costs_lib.WorkerCosts:
    """The fitted costs times 1 + noise_weight·cv; cv is that of all unless it clearly differs."""
    noise = changes.noise(state.watch)
    known = ~np.isnan(state.secs_per_microbatch) & (state.caps > 0)
    pooled = changes.median(noise[known]) if known.any() else changes.PRIOR_NOISE
    spread = 2.0 * pooled / np.sqrt(2.0 * np.maximum(state.watch.rounds, 1.0))
    own = np.sign(noise - pooled) * np.maximum(np.abs(noise - pooled) - spread, 0.0)
    return estimate.costs_of(
        state.overhead_secs, state.secs_per_microbatch, 1.0 + noise_weight * (pooled + own)
    )


def _with_newcomers(
    state: FittedState,
    costs: costs_lib.WorkerCosts,
    total: int,
    caps: np.ndarray,
    probe_microbatches: int,
) -> np.ndarray:
    """Quotas of a round in which some workers have never been seen."""
    newcomers = state.unknown
    known = (caps > 0) & ~newcomers
    if newcomers.sum() > known.sum():  # no basis: all the same, unseen ones first if too few
        chosen = (caps > 0) if total >= (caps > 0).sum() else newcomers
        return shares.largest_remainder(chosen.astype(np.float64), total, caps=caps)
    probes = np.where(newcomers, np.minimum(caps, probe_microbatches), 0)
    if probes.sum() > total:
        return shares.largest_remainder(newcomers.astype(np.float64), total, caps=probes)
    room = np.where(known, caps, 0)
    rest = min(total - int(probes.sum()), int(room.sum()))
    quotas = probes + solver.solve_quotas(costs, rest, caps=room, current=state.kept)
    if quotas.sum() < total:  # the known workers are full
        left = total - int(quotas.sum())
        quotas += shares.largest_remainder(newcomers.astype(np.float64), left, caps=caps - quotas)
    return quotas


def _may_stay(state: FittedState, total: int, caps: np.ndarray) -> bool:
    """Whether all is settled and no look at the costs is due."""
    return bool(
        not state.settling
        and state.rounds % _SOLVE_ROUNDS
        and total == state.budget
        and shares.are_allowed(state.kept, total, caps)
    )


def _is_worth_it(
    options: Options, state: FittedState, costs: costs_lib.WorkerCosts, quotas: np.ndarray
) -> bool:
    """Whether to leave the kept quotas for these."""
    if state.settling:
        return True
    old, new = costs.round_secs(state.kept), costs.round_secs(quotas)
    slowest = [int(np.argmax(old)), int(np.argmax(new))]
    rounds = np.maximum(state.samples.start_count, 1.0)
    errors = changes.noise(state.watch) * np.maximum(old, new) / np.sqrt(rounds)
    error = float(np.sqrt((errors[slowest] ** 2).sum()))
    least = max(options.min_gain * old.max(), options.confidence * error)
    return bool(old.max() - new.max() > least)
