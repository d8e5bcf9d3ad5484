"""Are the quotas that a policy chooses better than equal ones, in the rounds they realise?

A cost model takes a worker's seconds to be its own. Where workers share cores they are not: who
has more to do runs alone at the end and looks faster, who starts first looks faster, and quotas
that follow such clocks make rounds longer. The guard here asks the only clock that cannot
mislead, the realised round max_i t_i, and falls back to equal split where that is no slower.
Assumes nothing of the policy; leaves to it how a change is answered, and goes back to it when
the rounds have changed.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from hetjax.quota import policies, shares

_SKIPPED, _CHOSEN, _EQUAL = range(3)  # what a round tells about: nothing, the policy, equal split
_WAIT = 10  # rounds in which a policy may settle before it is tried
_MOST_PAIRS = 16
_LEAST_PAIRS = 2
_CONFIDENCE = 3.0  # standard errors, at which a trial ends early
_PRIOR_SPREAD = 0.05  # of the log ratio of a pair, assumed before any was seen
_PRIOR_PAIRS = 4.0  # what that assumption weighs
_CHANGED = math.log(1.2)  # log seconds by which rounds are no longer those of the trial
_MOST_WIDTH = 0.4  # the same where rounds are noisy, at most
_CLEAR = math.log(0.8)  # quotas that much below equal split need no new trial
_AGREES = math.log(1.5)  # by which a first round may exceed what the clocks forecast
_AFFORDABLE = 2.0  # times the round, that a round of equal split may take in a trial
_SAVED = 0.005  # of the rounds since the last trial, added to that
_PATIENCE = 3  # changed rounds in a row that end the hold
_MOST_PATIENCE = 48


class GuardState(NamedTuple):
    inner: Any  # of the guarded policy
    budget: int
    most: np.ndarray  # i64[n], the largest caps since a worker joined or left
    equal: np.ndarray  # i64[n], equal split of full rounds
    quotas: np.ndarray  # i64[n], of the last assign
    kind: int  # what that round will tell about
    clocks: policies.RoundTimes  # of each worker's last round of work
    recent: np.ndarray  # f64[_WAIT], log secs of the policy's last rounds, newest last
    rounds: int  # of the policy's, since the last trial
    novel: int  # rounds of quotas that were not tried, less rounds of others
    trying: bool
    held: bool  # equal split is
    chosen_logs: np.ndarray  # f64[_MOST_PAIRS], log secs in the trial; NaN: none yet
    equal_logs: np.ndarray  # f64[_MOST_PAIRS]
    judged: np.ndarray  # i64[n], the policy's quotas in the last trial; all 0: none yet
    level: float  # log secs of the better one in the last trial; NaN: none yet
    equal_level: float  # log secs of equal split in the last trial, or when last the policy's
    width: float  # log secs from `level`, beyond which a round has changed
    odd: int  # rounds in a row that have changed while held, negative: shorter ones
    patience: int  # how many of them end the hold


def guarded(policy: policies.QuotaPolicy) -> policies.QuotaPolicy:
    """The policy's quotas, or equal split where its realised rounds are not shorter.

    A round's length is T = max_i t_i over its workers' own clocks. Once the policy's quotas have
    differed from equal split for about 10 full rounds, both are run in turn, in pairs of rounds
    whose order alternates, and the log ratios d = log T_chosen − log T_equal are collected until

        |mean d| > 3·se(d), or 16 pairs are done,

    with a mean and a standard error that an outlier does not move. If mean d < 0 the policy goes
    on, and is tried again only for other quotas or rounds of another length. Otherwise equal
    split is held, the policy watching, until three rounds in a row are 1.2x longer or shorter
    than in the trial; then the two are tried again at once. After a retrial that ends as the
    last one did, twice as many rounds in a row are asked for. There are no retrials by the
    clock. When a worker joins or leaves, everything starts anew.

    No first trial is made where the policy began with equal split and its rounds became clearly
    shorter, as the workers' clocks say too. Where these forecast that equal split takes more than
    twice the round, the trial waits until it costs little beside the rounds before it. Smaller
    rounds, those in which a cap is lower for once, and those that a gate closed early tell
    nothing.

    Args:
      policy: any policy; its state is a part of the guard's.

    Example:
      >>> policy = guarded(policies.static([3, 1]))  # but the two workers are the same
      >>> caps, state = np.array([8, 8]), policy.init(2, 8)
      >>> for _ in range(20):
      ...     quotas, state = policy.assign(state, 8, caps)
      ...     state = policy.observe(state, policies.RoundTimes(quotas, np.ones(2), 1.0 * quotas))
      >>> policy.assign(state, 8, caps)[0].tolist()
      [4, 4]
    """

    def init(num_workers: int, budget: int) -> GuardState:
        return _fresh(policy.init(num_workers, budget), budget, np.zeros(num_workers, np.int64))

    def assign(state: GuardState, total: int, caps: np.ndarray):
        caps = np.asarray(caps, np.int64)
        same = bool(((caps > 0) == (state.most > 0)).all())
        if state.held and same:  # the policy is not asked, and keeps what it would go back to
            equal = state.equal if _is_full(state, total, caps) else _equal_split(total, caps)
            return _decided(state, total, caps, equal, _EQUAL)
        chosen, inner = policy.assign(state.inner, total, caps)
        state = state._replace(inner=inner) if same else _fresh(inner, state.budget, caps)
        if state.trying and _is_full(state, total, caps) and _equal_is_next(state):
            return _decided(state, total, caps, state.equal, _EQUAL)
        return _decided(state, total, caps, chosen, _CHOSEN)

    def observe(state: GuardState, times: policies.RoundTimes) -> GuardState:
        done = np.asarray(times.microbatches_done, np.int64)
        state = state._replace(inner=policy.observe(state.inner, times))
        if not state.held:
            state = state._replace(clocks=_last_clocks(state.clocks, times))
        if state.kind == _SKIPPED or (done != state.quotas).any():
            return state
        log_secs = math.log(max(float(np.max(times.compute_secs)), 1e-12))
        if state.trying:
            return _tried(state, log_secs)
        return (_held if state.held else _followed)(state, log_secs)

    return policies.QuotaPolicy(init, assign, observe)


def _fresh(inner: Any, budget: int, caps: np.ndarray) -> GuardState:
    """The state of a guard that has seen nothing."""
    nothing, zeros = np.full(_MOST_PAIRS, np.nan), np.zeros_like(caps)
    return GuardState(
        inner=inner,
        budget=budget,
        most=caps,
        equal=_equal_split(min(budget, int(caps.sum())), caps),
        quotas=zeros,
        kind=_SKIPPED,
        clocks=policies.RoundTimes(zeros, np.full(caps.size, np.nan), np.zeros(caps.size)),
        recent=np.zeros(_WAIT),
        rounds=0,
        novel=0,
        trying=False,
        held=False,
        chosen_logs=nothing,
        equal_logs=nothing,
        judged=zeros,
        level=np.nan,
        equal_level=np.nan,
        width=_CHANGED,
        odd=0,
        patience=_PATIENCE,
    )


def _equal_split(total: int, caps: np.ndarray) -> np.ndarray:
    present = caps > 0
    return shares.largest_remainder((present | ~present.any()) * 1.0, total, caps=caps)


def _is_full(state: GuardState, total: int, caps: np.ndarray) -> bool:
    """Whether the round could be one of full equal split."""
    return total == state.budget and bool((state.equal <= caps).all())


def _decided(
    state: GuardState, total: int, caps: np.ndarray, quotas: np.ndarray, kind: int
) -> tuple[np.ndarray, GuardState]:
    """The quotas, and the state that knows what their round will tell."""
    most = np.maximum(state.most, caps)
    full = _is_full(state, total, caps)
    if not full or ((quotas >= caps) & (caps < most)).any():
        kind = _SKIPPED
    return quotas.copy(), state._replace(most=most, quotas=quotas, kind=kind)


def _equal_is_next(state: GuardState) -> bool:
    """Whether the trial's next round is one of equal split: chosen, equal, equal, chosen, …"""
    num_chosen, num_equal = _count(state.chosen_logs), _count(state.equal_logs)
    return num_chosen > num_equal if num_chosen != num_equal else num_equal % 2 == 1


def _last_clocks(old: policies.RoundTimes, new: policies.RoundTimes) -> policies.RoundTimes:
    busy = np.asarray(new.microbatches_done) > 0
    if busy.all():
        return new
    return policies.RoundTimes(*(np.where(busy, b, a) for a, b in zip(old, new, strict=True)))


def _forecast_log(state: GuardState) -> float:
    """Log of how long equal split would take, if the workers' clocks were their own.

    A round's start is left out where it can be told apart: a cold one would look dear for good.
    """
    done, first, total = state.clocks
    split = (done > 1) & ~np.isnan(first)
    secs = np.where(split, total - first, total) / np.maximum(done - split, 1)
    return math.log(max(float((state.equal * secs).max()), 1e-12))


def _followed(state: GuardState, log_secs: float) -> GuardState:
    """A round of the policy's quotas, outside a trial: is one due?"""
    differs = bool((state.quotas != state.equal).any())
    is_novel = differs and bool((state.quotas != state.judged).any())
    state = state._replace(
        recent=np.append(state.recent[1:], log_secs),
        rounds=state.rounds + 1,
        novel=min(state.novel + 1, 2 * _WAIT) if is_novel else max(state.novel - 1, 0),
    )
    if not differs and not state.judged.any():
        state = state._replace(equal_level=log_secs)
    if not differs or state.rounds < _WAIT:
        return state
    usual = float(np.sort(state.recent)[_WAIT // 2])
    forecast = _forecast_log(state)
    is_clear = usual < state.equal_level + _CLEAR
    if not state.judged.any():  # a single round may have been a cold one: do the clocks agree?
        agrees = state.equal_level - forecast < _AGREES
        is_clear = is_clear and agrees and usual < forecast + _CLEAR
    is_due = (state.novel >= _WAIT and not is_clear) or abs(usual - state.level) > state.width
    affordable = math.log(_AFFORDABLE + _SAVED * state.rounds)
    return _start_trial(state) if is_due and forecast <= usual + affordable else state


def _held(state: GuardState, log_secs: float) -> GuardState:
    """A round of equal split, outside a trial: are rounds still what they were?"""
    off = log_secs - state.level
    if abs(off) <= state.width:
        return state._replace(odd=0)
    odd = max(state.odd, 0) + 1 if off > 0 else min(state.odd, 0) - 1
    if abs(odd) < state.patience:
        return state._replace(odd=odd)
    patience = min(2 * state.patience, _MOST_PATIENCE)
    return _start_trial(state)._replace(patience=patience)


def _start_trial(state: GuardState) -> GuardState:
    nothing = np.full(_MOST_PAIRS, np.nan)
    return state._replace(trying=True, held=False, odd=0, chosen_logs=nothing, equal_logs=nothing)


def _tried(state: GuardState, log_secs: float) -> GuardState:
    """A round of a trial: is it decided?"""
    if state.kind == _CHOSEN:
        logs = _with(state.chosen_logs, log_secs)
        state = state._replace(chosen_logs=logs, judged=state.quotas)
    else:
        state = state._replace(equal_logs=_with(state.equal_logs, log_secs))
    num_chosen, num_pairs = _count(state.chosen_logs), _count(state.equal_logs)
    if num_chosen != num_pairs or num_pairs < _LEAST_PAIRS:
        return state
    mean, error, _ = _robust_mean(
        (state.chosen_logs - state.equal_logs)[:num_pairs], _PRIOR_SPREAD, _PRIOR_PAIRS
    )
    if abs(mean) <= _CONFIDENCE * error and num_pairs < _MOST_PAIRS:
        return state
    held = mean >= 0
    better = (state.equal_logs if held else state.chosen_logs)[:num_pairs]
    spread = _robust_mean(better, _PRIOR_SPREAD, _PRIOR_PAIRS)[2]
    return state._replace(
        trying=False,
        held=held,
        level=float(np.median(better)),
        equal_level=float(np.median(state.equal_logs[:num_pairs])),
        width=float(np.clip(3.0 * spread, _CHANGED, _MOST_WIDTH)),
        rounds=0,
        novel=0,
        patience=state.patience if held else _PATIENCE,
    )


def _robust_mean(
    values: np.ndarray, prior_spread: float, prior_count: float
) -> tuple[float, float, float]:
    """`(mean, its standard error, spread)`; values beyond 2 spreads of the median count as 2."""
    centre = np.median(values)
    variance = (1.4826 * np.median(np.abs(values - centre))) ** 2
    count = values.size
    spread = np.sqrt((count * variance + prior_count * prior_spread**2) / (count + prior_count))
    mean = centre + np.clip(values - centre, -2.0 * spread, 2.0 * spread).mean()
    return float(mean), float(1.25 * spread / np.sqrt(count)), float(spread)


def _count(logs: np.ndarray) -> int:
    return int((~np.isnan(logs)).sum())


def _with(logs: np.ndarray, log_secs: float) -> np.ndarray:
    logs = logs.copy()
    logs[_count(logs)] = log_secs
    return logs
