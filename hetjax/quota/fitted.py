"""Quotas from a fitted cost model, robust to noise and to changes of speed.

`estimate.py` fits what a round costs each worker, and says when a worker has changed. `solver.py`
finds the exact quotas for the costs. This module decides when they are worth moving to.
`adaptive.py` decides whether they are used, and which workers are probed.
"""

from typing import NamedTuple

import numpy as np

from hetjax.quota import estimate, policies, solver

_TRUSTED = 4.0  # an observation farther off, in standard deviations, counts as one so far off
_FEW = 8  # rounds before which nothing counts as an outlier
_COMMON = 3.0  # standard errors beyond which the median residual is a change of all workers
_WARMED = 0.8  # if a round takes less than this part of what the first ones say, they were cold
LITTLE = 3  # most first rounds of a worker that may have been cold
_KEPT_IDLE = 2.0  # rounds as many as what was seen of a worker counts once it has quota 0
_SOLVE_ROUNDS = 8  # between two solutions when settled: one costs the host 0.2 ms


class FittedState(NamedTuple):
    budget: int
    kept: np.ndarray  # i64[n], the quotas of full rounds; all 0: none yet
    caps: np.ndarray  # i64[n], of the last assign
    overhead_secs: np.ndarray  # f64[n], fitted; NaN: never seen
    secs_per_microbatch: np.ndarray  # f64[n], fitted; NaN: never seen
    samples: estimate.Samples  # since each worker's last change
    seen: np.ndarray  # i64[n], rounds in which it was seen since then
    watch: estimate.Detector
    settling: int  # rounds left in which every better solution is taken
    pace: float = 1.0  # times slower than fitted that all were in the last round; 1: not clearly
    rounds: int = 0  # observed


class Settings(NamedTuple):
    """The options of `adaptive.adaptive`."""

    settle_rounds: int
    min_gain: float
    confidence: float
    noise_weight: float
    probe_microbatches: int
    drift: float
    alarm: float


def fitted(options: Settings) -> policies.QuotaPolicy:
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
    return policies.with_options(options, _init, _assign, _observe)


def _init(options: Settings, num_workers: int, budget: int) -> FittedState:
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
        watch=estimate.no_watch(num_workers),
        settling=options.settle_rounds,
    )


def _forgotten(options: Settings, state: FittedState, workers: np.ndarray) -> FittedState:
    """The workers where bool[n] is true as if never seen."""
    unseen = _init(options, workers.size, state.budget)
    fields = ("overhead_secs", "secs_per_microbatch", "samples", "seen", "watch")
    return estimate.with_fields_of(unseen, state, workers, fields)


def _assign(
    options: Settings, state: FittedState, total: int, caps: np.ndarray
) -> tuple[np.ndarray, FittedState]:
    """The kept quotas, or better ones that are worth it."""
    caps = np.asarray(caps, np.int64)
    if ((caps > 0) != (state.caps > 0)).any():
        joined = (state.caps == 0) & (caps > 0)
        state = _forgotten(options, state, joined)._replace(settling=options.settle_rounds)
    state = state._replace(caps=caps)
    stays = solver.are_allowed(state.kept, total, caps)
    is_full = total == state.budget
    if stays and is_full and not state.settling and state.rounds % _SOLVE_ROUNDS:
        return state.kept.copy(), state
    costs = _inflated_costs(state, options.noise_weight)
    newcomers = (caps > 0) & np.isnan(state.secs_per_microbatch)
    if newcomers.any():
        return _with_newcomers(state, costs, total, newcomers, options.probe_microbatches), state
    lowered = (state.kept > caps) & (caps > 0)  # only for this round
    if not is_full or lowered.any():
        return solver.solve_quotas(costs, total, caps=caps, current=state.kept), state
    kept = solver.solve_with_all(costs, total, caps=caps, current=state.kept)
    if stays and not state.settling:
        old, new = costs.round_secs(state.kept), costs.round_secs(kept)
        slowest = [int(np.argmax(old)), int(np.argmax(new))]
        rounds = np.maximum(state.samples.start_count, 1.0)
        errors = estimate.noise(state.watch) * np.maximum(old, new) / np.sqrt(rounds)
        error = float(np.sqrt((errors[slowest] ** 2).sum()))
        if old.max() - new.max() <= max(options.min_gain * old.max(), options.confidence * error):
            kept = state.kept
    return kept.copy(), state._replace(kept=kept)


def _observe(options: Settings, state: FittedState, times: policies.RoundTimes) -> FittedState:
    """Adds rounds to what is known of the workers, without what was before a change.

    The times are those of a round, [n], or of several in which all workers did some, [k, n].
    """
    done, first_secs, compute_secs = (np.atleast_2d(field) for field in times[:3])
    done = done.astype(np.int64, copy=False)
    busy, num_rounds = done[-1] > 0, len(done)
    overhead, slope = state.overhead_secs, state.secs_per_microbatch
    seen = busy & ~np.isnan(slope)
    expected = np.where(seen, overhead + slope * done, 1.0)
    usual = seen & (state.kept > 0)
    logs = np.log(np.maximum(compute_secs, 1e-12) / expected)
    paces = _common_paces(logs[:, usual], estimate.noise(state.watch)[usual])
    secs = np.where(busy, compute_secs, 1.0) / paces
    first = np.where(done > 1, first_secs / paces, np.where(busy, secs, np.nan))
    idle = seen & (state.kept == 0) & (state.kept.sum() > 0)
    little = seen & ((state.seen <= LITTLE) | idle)
    warmed = little & (secs[-1] < _WARMED * expected[-1])
    # One microbatch a round tells no overhead, and one taken for none would never be given two.
    overhead = np.where(warmed, np.minimum(overhead, slope), overhead)
    if warmed.any():
        state, seen = _forgotten(options, state, warmed), seen & ~warmed
    samples = state.samples
    if idle.any():  # seen rarely: rounds of long ago would decide for hundreds of rounds
        few = np.minimum(_KEPT_IDLE / np.maximum(samples.start_count, 1e-12), 1.0)
        samples = estimate.Samples(*(np.where(idle, few, 1.0) * field for field in samples))
    rounds = np.maximum(samples.start_count, 1.0)
    smaller = np.sqrt(np.maximum(samples.microbatches / rounds / np.maximum(done, 1), 1.0))
    watch, changed, scores, deviations = estimate.watched(
        state.watch,
        (done, first, secs),
        log_ratios=np.where(seen, logs - np.log(paces), 0.0),
        scales=smaller * np.sqrt(1.0 + 1.0 / rounds),
        seen=seen,
        usual=seen & (state.kept > 0),  # one seen as a favour is no part of a majority
        drift=options.drift,
        alarm=options.alarm,
    )
    trusted = np.where(rounds > _FEW, _TRUSTED, np.inf)
    factors = np.exp((np.clip(scores, -trusted, trusted) - scores) * deviations)
    new = estimate.samples_of(done, first * factors, secs * factors)
    samples = estimate.Samples(*(a + b.sum(axis=0) for a, b in zip(samples, new, strict=True)))
    num_seen = state.seen + num_rounds * busy
    if changed.any():
        window = estimate.samples_of(watch.done, watch.first_secs, watch.compute_secs)
        since = estimate.Samples(*(field.sum(axis=1) for field in window))
        samples = estimate.choose(changed, since, samples)
        num_seen = np.where(changed, since.start_count, num_seen).astype(np.int64)
    overhead, slope = estimate.fit(samples, overhead, slope)
    return state._replace(
        overhead_secs=overhead,
        secs_per_microbatch=slope,
        samples=samples,
        seen=num_seen,
        watch=watch,
        pace=float(paces[-1, 0]),
        settling=options.settle_rounds if changed.any() else max(state.settling - num_rounds, 0),
        rounds=state.rounds + num_rounds,
    )


def _common_paces(log_ratios: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """How many times slower than fitted all are, f64[rounds, 1]; 1 where that may be noise."""
    if noise.size < 2:
        return np.ones((len(log_ratios), 1))
    low, high = _middle(log_ratios)
    common = np.where(np.abs(low) < np.abs(high), low, high)  # more than half are beyond it
    error = 1.25 * (0.5 * sum(_middle(noise))) / np.sqrt(noise.size)
    is_clear = (low * high > 0) & (np.abs(common) > _COMMON * error)
    return np.exp(np.where(is_clear, common, 0.0))[:, None]


def _middle(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two values around the median of a few, f64[…, ≥ 1], at a tenth of what NumPy's costs."""
    ordered, count = np.sort(values), values.shape[-1]
    return ordered[..., (count - 1) // 2], ordered[..., count // 2]


def _inflated_costs(state: FittedState, noise_weight: float) -> solver.WorkerCosts:
    """The fitted costs times 1 + noise_weight·cv; cv is that of all unless it clearly differs."""
    noise = estimate.noise(state.watch)
    known = ~np.isnan(state.secs_per_microbatch) & (state.caps > 0)
    pooled = 0.5 * sum(_middle(noise[known])) if known.any() else estimate.PRIOR_NOISE
    spread = 2.0 * pooled / np.sqrt(2.0 * np.maximum(state.watch.rounds, 1.0))
    own = np.sign(noise - pooled) * np.maximum(np.abs(noise - pooled) - spread, 0.0)
    return estimate.costs_of(
        state.overhead_secs, state.secs_per_microbatch, 1.0 + noise_weight * (pooled + own)
    )


def _with_newcomers(
    state: FittedState,
    costs: solver.WorkerCosts,
    total: int,
    newcomers: np.ndarray,
    probe_microbatches: int,
) -> np.ndarray:
    """Quotas of a round in which the workers in bool[n] have never been seen."""
    caps = state.caps
    known = (caps > 0) & ~newcomers
    if newcomers.sum() > known.sum():  # no basis: all the same, unseen ones first if too few
        chosen = (caps > 0) if total >= (caps > 0).sum() else newcomers
        return solver.largest_remainder(chosen.astype(np.float64), total, caps=caps)
    probes = np.where(newcomers, np.minimum(caps, probe_microbatches), 0)
    if probes.sum() > total:
        return solver.largest_remainder(newcomers.astype(np.float64), total, caps=probes)
    room = np.where(known, caps, 0)
    rest = min(total - int(probes.sum()), int(room.sum()))
    quotas = probes + solver.solve_quotas(costs, rest, caps=room, current=state.kept)
    if quotas.sum() < total:  # the known workers are full
        left = total - int(quotas.sum())
        quotas += solver.largest_remainder(newcomers.astype(np.float64), left, caps=caps - quotas)
    return quotas
