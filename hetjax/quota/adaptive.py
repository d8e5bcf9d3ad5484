"""Quotas from a fitted cost model, robust to noise and to changes of speed.

What `policies.py` describes, with the parts put together: `estimate.py` fits what a round costs
each worker, `changes.py` says when a worker is no longer the one it was, `solver.py` finds the
exact quotas for the costs, this module decides when they are worth moving to, and `guard.py`
whether they are what they promised.
"""

from typing import NamedTuple

import numpy as np

from hetjax.quota import changes, estimate, policies, shares, solver
from hetjax.quota import costs as costs_lib
from hetjax.quota import guard as guard_lib

_TRUSTED = 4.0  # an observation farther off, in standard deviations, counts as one so far off
_CLIPPED = 6.0  # a score farther off counts as this
_SUSPICIOUS = 4.0  # a CUSUM above it asks for another probe at once
_PROBE_SHARE = 0.01  # of the time, that probing workers of quota 0 may take
_PATIENT_PROBES = 4  # that may lead to nothing before the next ones come ever more rarely
_MOST_DOUBLINGS = 20
_COLD = 4.0  # by as much a worker's first rounds may be slower than the next
_WARMED = 0.8  # of what its first rounds say: faster than this, and they were cold ones
_LITTLE = 3  # rounds of a worker, that may have been cold
_SOLVE_ROUNDS = 8  # between two solutions when settled: one costs the host 0.2 ms


class AdaptiveState(NamedTuple):
    budget: int
    kept: np.ndarray  # i64[n], the quotas of full rounds; all 0: none yet
    caps: np.ndarray  # i64[n], of the last assign
    overhead_secs: np.ndarray  # f64[n], fitted; NaN: never seen
    secs_per_microbatch: np.ndarray  # f64[n], fitted; NaN: never seen
    samples: estimate.Samples  # since each worker's last change
    watch: changes.Watch
    idle_rounds: np.ndarray  # i64[n], since the worker last computed
    probes: np.ndarray  # i64[n], of a worker of quota 0, that led to nothing
    settling: int  # rounds left in which every better solution is taken
    rounds: int  # observed


def adaptive(
    *,
    settle_rounds: int = 50,
    min_gain: float = 0.01,
    confidence: float = 2.0,
    noise_weight: float = 1.0,
    probe_microbatches: int = 2,
    drift: float = 0.5,
    alarm: float = 12.0,
    guard: bool = True,
) -> policies.QuotaPolicy:
    """Exact quotas for the costs that the workers' clocks have shown.

    Every round fits overhead and seconds a microbatch of each worker to all rounds since the
    worker last changed, and solves min max_i t_i(k_i)·(1 + noise_weight·cv_i) exactly, cv_i the
    worker's relative noise. After the start, a change or a newcomer the solution is taken at
    once; later only if it saves more than `min_gain` of the round and than `confidence`
    standard errors of what it saves, so that noise alone moves nothing. A worker never seen
    gets a few microbatches first. One with quota 0 gets one now and then, so that it is noticed
    when it has recovered: so rarely that it costs at most about 1 % of the time, and, from the
    fifth on that led to nothing, half as often each time. First rounds may be cold (memory,
    caches): up to three are forgotten if the next is faster, and who got quota 0 for one, or for
    some that disagree, is seen again at once. Where the workers are not independent the model is
    wrong, so that what it chooses is tried against equal split: `guard.guarded`.

    Args:
      settle_rounds: rounds after a change in which every better solution is taken.
      min_gain: the least part of the round that a later move must save.
      confidence: standard errors that a later move must save.
      noise_weight: by how much a worker's noise counts as slowness; 0 ignores it.
      probe_microbatches: what a worker never seen gets in its first round among others.
      drift: of the CUSUM, standard deviations a round that are no change.
      alarm: of the CUSUM, at which a worker has changed.
      guard: whether equal split is held where the quotas' realised rounds are not shorter.

    Raises:
      ValueError: an option is negative, or no microbatch is left for a newcomer.

    Example:
      >>> policy = adaptive()
      >>> caps, secs = np.full(2, 9), np.array([1.0, 2.0])
      >>> quotas, state = policy.assign(policy.init(2, 9), 9, caps)
      >>> state = policy.observe(state, policies.RoundTimes(quotas, secs, secs * quotas))
      >>> policy.assign(state, 9, caps)[0].tolist()
      [6, 3]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272: self-adaptive allocation. There quotas follow speeds
      alone; the overhead, the exact solution and the treatment of noise are not from there.
      Page, "Continuous inspection schemes", Biometrika 41, 1954: CUSUM.
    """
    for name, value in {
        "settle_rounds": settle_rounds,
        "min_gain": min_gain,
        "confidence": confidence,
        "noise_weight": noise_weight,
        "drift": drift,
        "alarm": alarm,
    }.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be 0 or more.")
    if probe_microbatches < 1:
        raise ValueError(
            f"probe_microbatches is {probe_microbatches}; a newcomer needs 1 or more, or it "
            "would never be known."
        )

    def init(num_workers: int, budget: int) -> AdaptiveState:
        policies.check_sizes(num_workers, budget)
        zeros = np.zeros(num_workers, np.int64)
        unknown = np.full(num_workers, np.nan)
        return AdaptiveState(
            budget=budget,
            kept=zeros,
            caps=zeros,
            overhead_secs=unknown,
            secs_per_microbatch=unknown,
            samples=estimate.no_samples(num_workers),
            watch=changes.init(num_workers),
            idle_rounds=zeros,
            probes=zeros,
            settling=settle_rounds,
            rounds=0,
        )

    def assign(state: AdaptiveState, total: int, caps: np.ndarray):
        caps = np.asarray(caps, np.int64)
        state = _admit(state, caps, settle_rounds)
        if _may_stay(state, total, caps):
            return state.kept.copy(), state
        newcomers = (caps > 0) & np.isnan(state.secs_per_microbatch)
        costs = _inflated_costs(state, noise_weight)
        if newcomers.any():
            return _with_newcomers(state, costs, total, caps, probe_microbatches), state
        lowered = (state.kept > caps) & (caps > 0)  # for this round alone
        if total != state.budget or lowered.any():
            return solver.solve_quotas(costs, total, caps=caps, current=state.kept), state
        kept = solver.solve_quotas(costs, total, caps=caps, current=state.kept)
        if _is_allowed(state.kept, total, caps) and not _is_worth_it(
            state, costs, kept, min_gain, confidence
        ):
            kept = state.kept
        state = state._replace(kept=kept)
        return _with_probe(state, costs, caps), state

    def observe(state: AdaptiveState, times: policies.RoundTimes) -> AdaptiveState:
        done = np.asarray(times.microbatches_done, np.int64)
        busy = done > 0
        secs = np.where(busy, times.compute_secs, 1.0)
        first = np.where(done > 1, times.first_secs, np.where(busy, secs, np.nan))
        seen = busy & ~np.isnan(state.secs_per_microbatch)
        warmed = seen & (secs < _WARMED * _expected(state, done)) & _seen_little(state)
        state, seen = _forget(state, warmed), seen & ~warmed
        state, factors = _score(state, done, first, secs, seen, drift)
        new = estimate.samples_of(done, first * factors, secs * factors)
        samples = estimate.add(state.samples, new)
        changed, watch = changes.cut(state.watch, alarm)
        if changed.any():
            window = estimate.samples_of(watch.done, watch.first_secs, watch.compute_secs)
            since = estimate.Samples(*(field.sum(axis=1) for field in window))
            samples = estimate.choose(changed, since, samples)
        overhead, slope = estimate.fit(samples, state.overhead_secs, state.secs_per_microbatch)
        return state._replace(
            overhead_secs=overhead,
            secs_per_microbatch=slope,
            samples=samples,
            watch=watch,
            idle_rounds=np.where(busy, 0, state.idle_rounds + 1),
            probes=np.where(changed | (state.kept > 0), 0, state.probes + (seen & (done == 1))),
            settling=settle_rounds if changed.any() else max(state.settling - 1, 0),
            rounds=state.rounds + 1,
        )

    policy = policies.QuotaPolicy(init, assign, observe)
    return guard_lib.guarded(policy) if guard else policy


def _admit(state: AdaptiveState, caps: np.ndarray, settle_rounds: int) -> AdaptiveState:
    """Takes the caps in: workers that joined are as if never seen."""
    joined = (state.caps == 0) & (caps > 0)
    if ((caps > 0) != (state.caps > 0)).any():
        state = state._replace(settling=settle_rounds)
    if not joined.any():
        return state._replace(caps=caps)
    state = _forget(state, joined)
    return state._replace(caps=caps, idle_rounds=np.where(joined, 0, state.idle_rounds))


def _forget(state: AdaptiveState, workers: np.ndarray) -> AdaptiveState:
    """The workers where bool[n] is true as if never seen."""
    unseen = estimate.no_samples(workers.size)
    return state._replace(
        overhead_secs=np.where(workers, np.nan, state.overhead_secs),
        secs_per_microbatch=np.where(workers, np.nan, state.secs_per_microbatch),
        samples=estimate.choose(workers, unseen, state.samples),
        watch=changes.forget(state.watch, workers),
        probes=np.where(workers, 0, state.probes),
    )


def _seen_little(state: AdaptiveState) -> np.ndarray:
    return state.samples.start_count <= _LITTLE


def _expected(state: AdaptiveState, done: np.ndarray) -> np.ndarray:
    return state.overhead_secs + state.secs_per_microbatch * done


def _score(
    state: AdaptiveState,
    done: np.ndarray,
    first: np.ndarray,
    secs: np.ndarray,
    seen: np.ndarray,
    drift: float,
) -> tuple[AdaptiveState, np.ndarray]:
    """Watches a round; also the factors f64[n] that bring outliers back to what is trusted."""
    rounds = np.maximum(state.samples.start_count, 1.0)
    usual = state.samples.microbatches / rounds
    smaller = np.sqrt(np.maximum(usual / np.maximum(done, 1), 1.0))
    expected = np.where(seen, _expected(state, done), 1.0)
    ratios = np.where(seen, np.log(np.maximum(secs, 1e-12) / expected), 0.0)
    scales = smaller * np.sqrt(1.0 + 1.0 / rounds)
    residuals, deviations = changes.score(state.watch, ratios, scales)
    scores = np.where(seen, residuals / deviations, 0.0)
    factors = np.exp((np.clip(scores, -_TRUSTED, _TRUSTED) - scores) * deviations)
    watch = changes.learn_noise(state.watch, residuals / scales, seen)
    clipped = np.clip(scores, -_CLIPPED, _CLIPPED)
    watch = changes.push(watch, done, first, secs, clipped, drift=drift)
    return state._replace(watch=watch), factors


def _inflated_costs(state: AdaptiveState, noise_weight: float) -> costs_lib.WorkerCosts:
    """The fitted costs times 1 + noise_weight·cv, where cv is everyone's unless clearly not."""
    noise = changes.noise(state.watch)
    known = ~np.isnan(state.secs_per_microbatch) & (state.caps > 0)
    pooled = np.median(noise[known]) if known.any() else changes.PRIOR_NOISE
    spread = 2.0 * pooled / np.sqrt(2.0 * np.maximum(state.watch.rounds, 1.0))
    own = np.sign(noise - pooled) * np.maximum(np.abs(noise - pooled) - spread, 0.0)
    return estimate.costs_of(
        state.overhead_secs, state.secs_per_microbatch, 1.0 + noise_weight * (pooled + own)
    )


def _with_newcomers(
    state: AdaptiveState,
    costs: costs_lib.WorkerCosts,
    total: int,
    caps: np.ndarray,
    probe_microbatches: int,
) -> np.ndarray:
    """Quotas of a round in which some workers have never been seen."""
    newcomers = (caps > 0) & np.isnan(state.secs_per_microbatch)
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
    if quotas.sum() < total:  # the known ones are full
        left = total - int(quotas.sum())
        quotas += shares.largest_remainder(newcomers.astype(np.float64), left, caps=caps - quotas)
    return quotas


def _may_stay(state: AdaptiveState, total: int, caps: np.ndarray) -> bool:
    """Whether all is settled, nobody is to be probed, and no look at the costs is due."""
    return bool(
        not state.settling
        and state.rounds % _SOLVE_ROUNDS
        and total == state.budget
        and ((state.kept > 0) | (caps == 0)).all()
        and _is_allowed(state.kept, total, caps)
    )


def _is_allowed(quotas: np.ndarray, total: int, caps: np.ndarray) -> bool:
    return bool(quotas.sum() == total and (quotas <= caps).all())


def _is_worth_it(
    state: AdaptiveState,
    costs: costs_lib.WorkerCosts,
    quotas: np.ndarray,
    min_gain: float,
    confidence: float,
) -> bool:
    """Whether to leave the kept quotas for these."""
    if state.settling:
        return True
    old, new = costs.round_secs(state.kept), costs.round_secs(quotas)
    slowest = [int(np.argmax(old)), int(np.argmax(new))]
    rounds = np.maximum(state.samples.start_count, 1.0)
    errors = changes.noise(state.watch) * np.maximum(old, new) / np.sqrt(rounds)
    error = float(np.sqrt((errors[slowest] ** 2).sum()))
    return bool(old.max() - new.max() > max(min_gain * old.max(), confidence * error))


def _with_probe(state: AdaptiveState, costs: costs_lib.WorkerCosts, caps: np.ndarray) -> np.ndarray:
    """The kept quotas, one microbatch of them given to a worker of quota 0 when its time is."""
    idle = (caps > 0) & (state.kept == 0)
    if not idle.any():
        return state.kept.copy()
    round_secs = costs.round_secs(state.kept).max()
    alone = costs.round_secs(np.ones_like(caps))
    extra = np.maximum(alone - round_secs, 0.0) / round_secs
    waits = 2.0 ** np.clip(state.probes - _PATIENT_PROBES, 0, _MOST_DOUBLINGS)
    interval = np.maximum(extra * idle.sum() / _PROBE_SHARE, 1.0) * waits
    cusum = np.maximum(state.watch.slower, state.watch.faster)
    unsure = (state.samples.start_count == 1) | (_seen_little(state) & (cusum > 0.0))
    again = (cusum > _SUSPICIOUS) | (unsure & (alone <= _COLD * round_secs))
    interval = np.where(again, 1.0, interval)
    overdue = np.where(idle, state.idle_rounds - interval, -np.inf)
    worker = int(np.argmax(overdue))
    if overdue[worker] < 0:
        return state.kept.copy()
    others = np.where(idle, 0, caps)
    quotas = solver.solve_quotas(costs, state.budget - 1, caps=others, current=state.kept)
    quotas[worker] = 1
    return quotas
