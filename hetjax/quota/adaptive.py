"""Quotas from whichever of several ways to choose them would have had the shortest rounds.

One round tells what a microbatch took every worker. So the round that any quotas would have had
can be computed without trying them. This module computes it for four candidates and follows the
one whose rounds were shortest lately. The candidates: `fitted.py` (costs fitted since a worker last
changed), costs of only the last rounds, `sampled.py` (quotas that were best in the last rounds as
they were), and equal split. It also decides which workers of quota 0 get a microbatch to be seen
again. Assumes that a worker's seconds are its own; `guard.py` checks that.
"""

from typing import Annotated, NamedTuple

import numpy as np

from hetjax import parts
from hetjax.quota import estimate, fitted, lateness, policies, sampled, solver
from hetjax.quota import guard as guard_lib

_FITTED, _RECENT, _SAMPLED, _EQUAL = range(4)
_NUM_CANDIDATES = 4
_RECENT_KEPT = 0.7  # part of what the last rounds told that is kept each round
_MEMORY = 0.95  # part of the sum of the candidates' rounds that is kept each round
_MOST_REGRET = 4.0  # a candidate's round counts as at most so many times the best one's
_MIN_GAIN = 0.02  # part of the rounds that another candidate must have saved
_CONFIDENCE = 1.01  # standard errors of that; above 1: one late round is never enough
_CALM_GAIN = 0.05  # least gain of recent costs and sampled quotas if no worker changed lately
_EVERY = 4  # rounds between two solutions for the recent costs, when all is settled
_QUIET = 20  # rounds without a change of a worker after which the next one is believed at once
_SUSPICIOUS = 4.0  # a CUSUM above it asks for another probe at once
_PROBE_SHARE = 0.008  # part of the time that probing workers of quota 0 may take
_PATIENT_PROBES = 4  # probes that may lead to nothing before the next ones become ever rarer
_MOST_DOUBLINGS = 20
_FREE = 20.0  # rounds that probes beyond that may cost in all, or
_FAVOUR_SHARE = 0.08  # this part of the time; unbounded, one 1,000 times slower cost 9 % of 300
_UNSURE = 2.0  # standard errors by which a worker of quota 0 may be faster than it seems
_VAGUE = 0.1  # relative standard error above which that counts
_HICCUP = 10  # rounds after which one that used to work, or began slowly, is seen again anyway
_COLD = 4.0  # a worker's first rounds may be so many times slower than the next
_CHEAP = 2.0  # rounds that a look at a worker takes at most that is seen again and again
_USUAL = 3.0  # standard deviations of a round that may wait until some are learned from at once
_MOST_QUEUED = 8  # of these; as many at once cost the host hardly more than one alone

# What of a worker that has joined is as if it was never seen.
_OF_A_WORKER = (
    *("recent", "recent_overhead_secs", "recent_secs"),
    *("idle_rounds", "lateness", "worked", "probes"),
)


class AdaptiveState(NamedTuple):
    budget: int
    caps: np.ndarray  # i64[n], of the last assign
    fitted: fitted.FittedState
    recent: estimate.Samples  # of the last rounds, older ones ever less
    recent_overhead_secs: np.ndarray  # f64[n]; NaN: never seen
    recent_secs: np.ndarray  # f64[n], a microbatch; NaN: never seen
    sampled: sampled.SampledState
    wanted: np.ndarray  # i64[4, n], quotas of each candidate for the last full round
    losses: np.ndarray  # f64[4], sum of the rounds of each candidate, older ones ever less
    squares: np.ndarray  # f64[4, 4], sum of squared differences of these rounds, the same
    idle_rounds: np.ndarray  # i64[n], since the worker last computed
    lateness: lateness.Lateness  # which workers were late, owe some or are left out
    worked: np.ndarray  # i64[n], rounds of quotas above 0 since it was last seen as a favour
    probes: np.ndarray  # i64[n], probes of a worker of quota 0 that led to nothing
    secs: np.ndarray  # f64[2], of all rounds; what probes beyond their share have cost
    usual: np.ndarray  # f64[n], log ratios to what is expected that may wait; 0: nothing may
    queue: np.ndarray  # f64[8, 3, n], counts and seconds of rounds that nothing was learned from
    compares: bool = False  # the last assign was for a full round, and all workers were known
    chosen: int = _FITTED
    queued: int = 0  # rounds in the queue


@parts.factory
def adaptive(
    *,
    settle_rounds: Annotated[
        int, parts.integer(unit="rounds", says="after a change, in which any better solution wins")
    ] = 50,
    min_gain: Annotated[
        float, parts.number(at_least=0.0, says="least part of the round that a later move saves")
    ] = 0.01,
    confidence: Annotated[
        float, parts.number(at_least=0.0, unit="standard errors", says="that a later move saves")
    ] = 2.0,
    noise_weight: Annotated[
        float, parts.number(at_least=0.0, says="by how much noise counts as slowness; 0: not")
    ] = 1.0,
    probe_microbatches: Annotated[
        int, parts.integer(at_least=1, unit="microbatches", says="in a worker's first round")
    ] = 2,
    drift: Annotated[
        float,
        parts.number(
            at_least=0.0, unit="standard deviations a round", says="that are no change (CUSUM)"
        ),
    ] = 0.5,
    alarm: Annotated[
        float, parts.number(at_least=0.0, says="of the CUSUM, at which a worker has changed")
    ] = 12.0,
    guard: Annotated[
        bool, parts.flag(says="hold equal split where the workers' clocks depend on their quotas")
    ] = True,
) -> policies.QuotaPolicy:
    """The quotas that would have had the shortest rounds lately, of four candidates.

    The candidates: exact quotas for costs fitted to all rounds since a worker last changed; exact
    quotas for costs of only the last rounds; the fixed quotas that were best in the last rounds as
    they were; equal split. After a round of quotas k in which worker i computed t_i, quotas k'
    would have taken T(k') = max_i t_i·(k'_i + ρ_i)/(k_i + ρ_i), with ρ_i its fitted overhead over
    seconds a microbatch. Each candidate has the sum of its T, discounted by 0.95 a round. The one
    with the least sum is followed once it has saved 2 % and one standard error. Recent costs and
    sampled quotas must save 5 % if no worker has changed lately.

    A worker never seen gets a few microbatches first. One with quota 0 gets one now and then, to
    notice when it has recovered. These probes are so rare that they cost at most about 1 % of the
    time. From the fifth on that led to nothing, they are half as often each time. A worker that
    used to work is seen again after 10 rounds in any case, since what happened to it may have been
    short. Looks beyond those cost at most 20 rounds or 8 % of the time. After a round that is
    slower than any noise explains, a worker gets one microbatch in the next, since what happened to
    it may go on. One that is very late again before its work has saved what that cost gets nothing
    for as long, if its late rounds have cost 3 times those of the others in the mean. So none is
    left out where all are late at times. Where all is calm up to 8 rounds are learned from at once.
    If the workers are not independent T is wrong: see `guard.guarded`.

    Args:
      settle_rounds: rounds after a change in which every better solution of the fitted costs is
        taken.
      min_gain: the least part of the round that a later move must save.
      confidence: standard errors that a later move must save.
      noise_weight: by how much a worker's noise counts as slowness; 0 ignores it.
      probe_microbatches: what a worker never seen gets in its first round among others.
      drift: standard deviations a round that the CUSUM takes for no change.
      alarm: the CUSUM at which a worker has changed.
      guard: whether equal split is held if the workers' clocks depend on their quotas.

    Raises:
      ValueError: an option is out of range.

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
      alone; the overhead, the exact solution and the choice among candidates are not from there.
      Herbster, Warmuth, "Tracking the best expert", Machine Learning 32, 1998: the task of the
      choice. Here the best of the discounted past is followed, with a margin.
    """
    settings = fitted.Settings(
        settle_rounds, min_gain, confidence, noise_weight, probe_microbatches, drift, alarm
    )
    policy = policies.with_options(fitted.fitted(settings), _init, _assign, _observe)
    return guard_lib.guarded(policy) if guard else policy


def _init(model: policies.QuotaPolicy, num_workers: int, budget: int) -> AdaptiveState:
    """The state of workers that nothing is known of."""
    zeros = np.zeros(num_workers, np.int64)
    unknown = np.full(num_workers, np.nan)
    return AdaptiveState(
        budget=budget,
        caps=zeros,
        fitted=model.init(num_workers, budget),
        recent=estimate.no_samples(num_workers),
        recent_overhead_secs=unknown,
        recent_secs=unknown,
        sampled=sampled.init(num_workers),
        wanted=np.zeros((_NUM_CANDIDATES, num_workers), np.int64),
        losses=np.zeros(_NUM_CANDIDATES),
        squares=np.zeros((_NUM_CANDIDATES, _NUM_CANDIDATES)),
        idle_rounds=zeros,
        lateness=lateness.none(num_workers),
        worked=zeros,
        probes=zeros,
        secs=np.zeros(2),
        usual=np.zeros(num_workers),
        queue=np.zeros((_MOST_QUEUED, 3, num_workers)),
    )


def _assign(
    model: policies.QuotaPolicy, state: AdaptiveState, total: int, caps: np.ndarray
) -> tuple[np.ndarray, AdaptiveState]:
    """The quotas of the candidate that is followed, changed by probes and by care."""
    caps = np.asarray(caps, np.int64)
    if state.queued and total == state.budget and (caps == state.caps).all():
        return state.wanted[state.chosen].copy(), state
    state = _flushed(model, state)
    quotas, own = model.assign(state.fitted, total, caps)
    if ((state.caps > 0) != (caps > 0)).any():  # the candidates begin anew
        fresh, stay = _init(model, caps.size, state.budget), (state.caps > 0) | (caps == 0)
        state = estimate.with_fields_of(state, fresh, stay, _OF_A_WORKER)
    state = state._replace(caps=caps, fitted=own, compares=False, usual=0.0 * state.usual)
    if np.isnan(own.secs_per_microbatch[caps > 0]).any():
        return quotas, state  # the model gives workers never seen their first microbatches
    lowered = (state.wanted > caps).any(axis=0) & (caps > 0)  # only for this round
    if total == state.budget and not lowered.any():
        state = state._replace(wanted=_wanted(state, quotas), compares=True)
        quotas = state.wanted[state.chosen].copy()
        idle = (caps > 0) & (quotas == 0)
        if idle.any():
            quotas, state = _with_probe(state, quotas, idle)
        elif own.kept.all() and _is_calm(state):
            return quotas, state._replace(usual=_USUAL * estimate.noise(own.watch))
    elif state.chosen != _FITTED and (state.wanted[state.chosen] * caps).any():
        quotas = solver.largest_remainder(state.wanted[state.chosen], total, caps=caps)
    careful = lateness.spared(state.lateness, caps, state.wanted[state.chosen] > 0)
    if (quotas > careful).any() and careful.sum() >= quotas.sum():
        costs = estimate.costs_of(own.overhead_secs, own.secs_per_microbatch)
        quotas = solver.solve_quotas(costs, int(quotas.sum()), caps=careful, current=quotas)
    return quotas, state


def _observe(
    model: policies.QuotaPolicy, state: AdaptiveState, times: policies.RoundTimes
) -> AdaptiveState:
    """Adds a round, at once or once some are queued."""
    done, first, secs = (np.asarray(field) for field in times[:3])
    timed = secs > 0
    if not timed.all():  # no work takes no time: a clock that says so is coarse
        least = 0.5 * secs[timed].min() if timed.any() else 1.0
        secs = np.where(done > 0, np.maximum(secs, least), 0.0)
    round = np.array([done, first, secs])
    if state.usual.any() and (done > 0).all():
        model_secs = state.fitted.overhead_secs + state.fitted.secs_per_microbatch * done
        if (np.abs(np.log(secs / model_secs)) < state.usual).all():
            queue = state.queue.copy()
            queue[state.queued] = round
            state = state._replace(queue=queue, queued=state.queued + 1)
            is_full = (state.fitted.rounds + state.queued) % _MOST_QUEUED == 0
            return _flushed(model, state) if is_full else state
    return _learned(model, _flushed(model, state), round[None])


def _flushed(model: policies.QuotaPolicy, state: AdaptiveState) -> AdaptiveState:
    """The state after the rounds that are queued, if any."""
    queued = state.queue[: state.queued]
    return _learned(model, state._replace(queued=0), queued) if len(queued) else state


def _learned(
    model: policies.QuotaPolicy, state: AdaptiveState, rounds: np.ndarray
) -> AdaptiveState:
    """Compares what each candidate would have taken, and fits the costs to the rounds.

    Args:
      model: of the fitted costs.
      state: before the rounds.
      rounds: f64[k, 3, n], microbatches done, first seconds, seconds; more than one: usual ones.
    """
    done, first, secs = rounds[:, 0].astype(np.int64), rounds[:, 1], rounds[:, 2]
    busy, num_rounds = done[-1] > 0, len(rounds)
    slope = state.fitted.secs_per_microbatch
    ratios = np.where(np.isnan(slope), 0.0, state.fitted.overhead_secs / slope)
    times = policies.RoundTimes(done, first, secs)
    own = model.observe(state.fitted, times)
    levels = np.where(busy, secs / np.maximum(done + ratios, 1e-12), np.nan)
    usual = np.where(np.isnan(own.secs_per_microbatch), 1.0, own.secs_per_microbatch * own.pace)
    if state.compares:
        state = _compared(state, np.where(busy, levels, usual), ratios)
        start, caps = state.wanted[_FITTED], state.caps
        sample = sampled.observe(state.sampled, levels, ratios, usual, start=start, caps=caps)
        state = state._replace(sampled=sample)
    quiet = own.settling - state.fitted.settling  # quiet rounds before a change of this round
    if quiet > 0 and quiet >= min(_QUIET, own.settling):
        state = _forgiven(state)
    new = estimate.samples_of(done, np.where(done > 1, first, secs), secs)
    kept = np.where(busy, _RECENT_KEPT**num_rounds, 1.0)
    weights = _weights(_RECENT_KEPT, num_rounds)
    recent = estimate.Samples(*(kept * state.recent + weights @ np.array(new)))
    recent_costs = estimate.fit(recent, state.recent_overhead_secs, state.recent_secs)
    given = state.wanted[state.chosen] > 0
    return state._replace(
        fitted=own,
        recent=recent,
        recent_overhead_secs=recent_costs[0],
        recent_secs=recent_costs[1],
        idle_rounds=np.where(busy, 0, state.idle_rounds + 1),
        lateness=lateness.after(state.lateness, state.fitted, own, times, given, state.caps > 0),
        worked=state.worked + num_rounds * (busy & given),
        probes=np.where(given, 0, state.probes + ((done[-1] == 1) & state.compares)),
        secs=np.add(state.secs, [secs.max(axis=1).sum(), 0.0]),
    )


def _weights(kept: float, num_rounds: int) -> np.ndarray:
    """What each of some rounds counts after the last one, f64[rounds]."""
    return kept ** np.arange(num_rounds - 1.0, -1.0, -1.0)


def _wanted(state: AdaptiveState, quotas: np.ndarray) -> np.ndarray:
    """The quotas of each candidate for a full round, i64[4, n]; `quotas` are the first one's."""
    budget, caps = state.budget, state.caps
    _, recent, _, equal = state.wanted
    is_solved = _is_calm(state) and state.fitted.rounds % _EVERY
    if not (is_solved and solver.are_allowed(recent, budget, caps)):
        costs = estimate.costs_of(state.recent_overhead_secs, state.recent_secs)
        recent = solver.solve_with_all(costs, budget, caps=caps, current=recent)
    sample = state.sampled.quotas
    if not solver.are_allowed(sample, budget, caps):
        sample = quotas
    if not solver.are_allowed(equal, budget, caps):
        equal = solver.equal_split(budget, caps)
    return np.stack([quotas, recent, sample, equal])


def _is_calm(state: AdaptiveState) -> bool:
    """Whether no worker has changed lately, seems to, is late, or owes some."""
    watch = state.fitted.watch
    suspicious = np.maximum(watch.slower, watch.faster) > _SUSPICIOUS
    is_settled = state.chosen != _RECENT and not state.fitted.settling
    return is_settled and not (suspicious | state.lateness.late | (state.lateness.debt > 0.0)).any()


def _compared(state: AdaptiveState, levels: np.ndarray, ratios: np.ndarray) -> AdaptiveState:
    """Adds what the round of each candidate would have been, and chooses one."""
    wanted = state.wanted
    rounds = np.where(wanted > 0, levels[:, None] * (wanted + ratios), 0.0).max(axis=2)
    shortest = np.maximum(rounds.min(axis=1, keepdims=True), 1e-300)
    rounds = np.minimum(rounds / shortest, _MOST_REGRET)
    kept, weighted = _MEMORY ** len(rounds), _weights(_MEMORY, len(rounds))[:, None] * rounds
    losses = kept * state.losses + weighted.sum(axis=0)
    differences = weighted[:, :, None] - weighted[:, None]
    squares = kept**2 * state.squares + (differences**2).sum(axis=0)
    chosen = state.chosen
    gain = np.full(_NUM_CANDIDATES, _MIN_GAIN)
    if not state.fitted.settling:  # costs of the last rounds move with all noise
        gain[_RECENT] = gain[_SAMPLED] = _CALM_GAIN
        chosen = _FITTED if chosen == _RECENT else chosen
    margins = np.maximum(gain * losses[chosen], _CONFIDENCE * np.sqrt(squares[chosen]))
    better = losses[chosen] - losses > margins
    if better.any():
        chosen = int(np.argmin(np.where(better, losses, np.inf)))
    return state._replace(losses=losses, squares=squares, chosen=chosen)


def _forgiven(state: AdaptiveState) -> AdaptiveState:
    """Follows the fitted costs, which know of a change now, as if they had known before."""
    losses, squares = state.losses.copy(), state.squares.copy()
    losses[_FITTED] = losses.min()
    squares[_FITTED] = squares[:, _FITTED] = 0.0
    return state._replace(losses=losses, squares=squares, chosen=_FITTED)


def _with_probe(
    state: AdaptiveState, wanted: np.ndarray, idle: np.ndarray
) -> tuple[np.ndarray, AdaptiveState]:
    """The chosen quotas, in which workers of quota 0 get one microbatch when it is time."""
    model, seen_little = state.fitted, state.fitted.seen <= fitted.LITTLE
    costs = estimate.costs_of(model.overhead_secs, model.secs_per_microbatch)
    round_secs = costs.round_secs(wanted).max()
    alone = costs.round_secs(np.ones_like(wanted))
    extra = np.maximum(alone - round_secs, 0.0) / round_secs
    waits = 2.0 ** np.clip(state.probes - _PATIENT_PROBES, 0, _MOST_DOUBLINGS)
    interval = np.maximum(extra * idle.sum() / _PROBE_SHARE, 1.0) * waits
    cusum = np.maximum(model.watch.slower, model.watch.faster)
    errors = estimate.noise(model.watch) / np.sqrt(np.maximum(model.samples.start_count, 1.0))
    unsure = (errors > _VAGUE) & (alone * (1.0 - _UNSURE * errors) <= round_secs)
    cold = (model.samples.start_count == 1) | (seen_little & (cusum > 0.0))
    again = (cusum > _SUSPICIOUS) | unsure | (cold & (alone <= _COLD * round_secs))
    total, spent = state.secs / round_secs
    allowed = spent + extra <= max(_FREE, _FAVOUR_SHARE * total)
    due = idle & ((again & allowed) | (state.idle_rounds >= interval))
    doublings = 2.0 ** np.minimum(state.probes, _MOST_DOUBLINGS)
    once = (state.worked >= _HICCUP) | (seen_little & (state.probes == 0))
    cheap = (alone <= _CHEAP * round_secs) & (state.idle_rounds >= _HICCUP * doublings)
    favoured = idle & ~due & allowed & (cheap | (once & (state.idle_rounds >= _HICCUP)))
    due = np.flatnonzero(due | favoured)[: state.budget // 2]
    if not due.size:
        return wanted, state
    cost = np.where(state.idle_rounds < interval, extra, 0.0)[due].max() * round_secs
    others = np.where(idle, 0, state.caps)
    quotas = solver.solve_quotas(costs, state.budget - due.size, caps=others, current=wanted)
    quotas[due] = 1
    worked = np.where(favoured & (quotas > 0), 0, state.worked)
    return quotas, state._replace(worked=worked, secs=np.add(state.secs, [0.0, cost]))
