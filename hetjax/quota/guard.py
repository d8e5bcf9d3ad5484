"""Do the workers' clocks depend on the quotas?

A cost model takes a worker's seconds to be its own. If workers share cores they are not: a worker
that has more to do runs alone at the end and looks faster. So quotas that follow such clocks
confirm themselves and make rounds longer. The clocks of equal rounds have no such bias between
workers. So the guard here looks at a few equal rounds now and then: would the policy's quotas have
been shorter by the clocks of those rounds? If not, it holds equal split. Assumes nothing of the
policy.
"""

from typing import Any, NamedTuple

import numpy as np

from hetjax.quota import estimate, policies, solver

_WAIT = 10  # rounds in which a policy may settle before its quotas are looked at
_LONGER = 8  # times as many rounds before the next look, if the quotas were right
_LONGEST_WAIT = 5120
_MOST_ROUNDS = 8  # equal rounds of a look
_FOLLOWED, _HELD = 2.0, 3.0  # standard errors that decide for the policy, against it
_SPREAD = 0.05  # least spread of what the policy saves, in rounds, assumed before any was seen
_SPREAD_ROUNDS = 4.0  # rounds that this assumption counts as
_OUTLIER = 2.0  # most rounds that one round's saving counts as
_SLOWER = 2.0  # equal rounds that are so many times longer are not tried at first
_MUCH_SLOWER = 4.0  # equal rounds that would be so many times longer are never tried
_SHARE = 0.005  # part of the rounds since the last look that a later look may cost
_WINDOW = 64  # equal rounds that say whether a hold goes on
_BURST = 3  # rounds of these that are enough if they are clear
_HOLD = 16  # least rounds of the first hold; twice as many each time
_LONGEST_HOLD = 1024

_NOTHING, _CHOSEN, _EQUAL = range(3)  # what the last round tells about


class Clocks(NamedTuple):
    """The clocks of each worker's last round of work, as in `RoundTimes`."""

    microbatches_done: np.ndarray  # i64[n]
    first_secs: np.ndarray  # f64[n]
    compute_secs: np.ndarray  # f64[n]


class GuardState(NamedTuple):
    inner: Any  # state of the guarded policy
    budget: int
    most: np.ndarray  # i64[n], the largest caps since a worker joined or left
    equal: np.ndarray  # i64[n], equal split of full rounds
    quotas: np.ndarray  # i64[n], given in the last round
    wanted: np.ndarray  # i64[n], the policy's for the last round
    judged: np.ndarray  # i64[n], the policy's quotas in the last look; all 0: none yet
    clocks: Clocks
    forecasts: np.ndarray  # f64[_WAIT], equal split's round over the policy's, by its clocks
    recent_secs: np.ndarray  # f64[_WAIT], the policy's last rounds
    equal_secs: np.ndarray  # f64[2, _WINDOW], of equal rounds: as they were; by policy's quotas
    secs: np.ndarray  # f64[2, _MOST_ROUNDS], of a look's rounds: the policy's, equal ones
    kind: int = _NOTHING  # what the last round tells about
    looking: bool = False
    held: bool = False  # equal split is held
    by_rounds: bool = False  # it is, because its rounds were shorter, against what clocks say
    rounds: int = 0  # rounds of quotas not judged, less rounds of judged ones; held: of the hold
    wait: int = _WAIT  # rounds before the next look; held: before the hold may end
    hold: int = _HOLD  # the least rounds of the next hold


def guarded(policy: policies.QuotaPolicy) -> policies.QuotaPolicy:
    """The policy's quotas, or equal split if the workers' clocks depend on their quotas.

    After 10 full rounds of unequal quotas comes a look: the policy's quotas and equal split take
    turns. Each equal round tells, by its workers' clocks, x = T(policy's quotas) − T(equal split).
    It is decided once the mean of x is 2 standard errors below 0 or 3 above it, and after 8 rounds
    in any case. The policy goes on if the mean is negative, else equal split is held. It is also
    held if its rounds were really the shorter ones by 3 standard errors. As long as they are
    shorter than the policy's last ones, nothing is decided for the policy.

    If the policy goes on, the next look comes after 8 times as many rounds of quotas other than
    the judged ones, so never if they stay. While equal split is held all rounds are equal ones and
    go on telling x. When its mean over the last 64 is below 0 by 2 standard errors, the policy is
    followed and looked at again: after 16 rounds at the earliest, each later time after twice as
    many. A hold that the clocks decided may end at once, by 3 standard errors of 3 rounds.

    A look waits while the clocks forecast that it would cost too much: that equal split takes more
    than 2 times the round, and after the first look more than 0.5 % of the rounds since then. Where
    they say more than 4 times, the round is the policy's, in a hold too, and tells nothing.
    Smaller rounds, those in which a cap is lower for once, and those that a gate closed early tell
    nothing. When a worker joins or leaves, everything starts anew.

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
        wanted, inner = policy.assign(state.inner, total, caps)
        if ((caps > 0) == (state.most > 0)).all():
            most = np.maximum(state.most, caps)
            if (most > state.most).any():
                equal = solver.equal_split(min(state.budget, int(most.sum())), most)
                state = state._replace(most=most, equal=equal)
            state = state._replace(inner=inner)
        else:
            state = _fresh(inner, state.budget, caps)
        full = total == state.budget == state.equal.sum() and bool((state.equal <= caps).all())
        quotas, kind = wanted, _CHOSEN
        if state.held or (full and state.looking and _equal_is_next(state)):
            quotas, kind = (state.equal if full else solver.equal_split(total, caps)), _EQUAL
            secs = [_round_secs(given, state.clocks) for given in (quotas, wanted)]
            if secs[0] > _MUCH_SLOWER * secs[1]:
                quotas, kind = wanted, _NOTHING
        if not full or ((quotas >= caps) & (caps < state.most)).any():
            kind = _NOTHING
        return quotas.copy(), state._replace(quotas=quotas, wanted=wanted, kind=kind)

    def observe(state: GuardState, times: policies.RoundTimes) -> GuardState:
        done = np.asarray(times.microbatches_done, np.int64)
        clocks = estimate.choose(done > 0, Clocks(*map(np.array, times[:3])), state.clocks)
        state = state._replace(inner=policy.observe(state.inner, times), clocks=clocks)
        if state.kind == _NOTHING or (done != state.quotas).any():
            return state
        secs = float(np.max(times.compute_secs))
        if state.kind == _EQUAL:
            newest = [secs, _round_secs(state.wanted, clocks)]
            equal_secs = np.column_stack([state.equal_secs[:, 1:], newest])
            state = state._replace(equal_secs=equal_secs)
        if state.looking:
            return _looked(state, secs)
        if state.held:
            return _held(state)
        if (state.quotas == state.equal).all():
            return state
        if (state.quotas == state.judged).all():
            return state._replace(rounds=max(state.rounds - 1, 0))
        return _followed(state._replace(rounds=state.rounds + 1), max(secs, 1e-300))

    return policies.QuotaPolicy(init, assign, observe)


def _fresh(inner: Any, budget: int, caps: np.ndarray) -> GuardState:
    """The state of a guard that has seen nothing."""
    zeros = np.zeros_like(caps)
    return GuardState(
        inner=inner,
        budget=budget,
        most=caps,
        equal=solver.equal_split(min(budget, int(caps.sum())), caps),
        quotas=zeros,
        wanted=zeros,
        judged=zeros,
        clocks=Clocks(zeros, np.full(caps.size, np.nan), np.zeros(caps.size)),
        forecasts=np.full(_WAIT, np.nan),
        recent_secs=np.full(_WAIT, np.nan),
        equal_secs=np.full((2, _WINDOW), np.nan),
        secs=np.full((2, _MOST_ROUNDS), np.nan),
    )


def _equal_is_next(state: GuardState) -> bool:
    """Whether the look's next round is an equal one: equal, chosen, chosen, equal, equal, …"""
    num_chosen, num_equal = (~np.isnan(state.secs)).sum(axis=1)
    return num_chosen > num_equal if num_chosen != num_equal else num_equal % 2 == 0


def _round_secs(quotas: np.ndarray, clocks: Clocks) -> float:
    """The round that the quotas would have had, by the clocks."""
    done, first, total = clocks
    split = (done > 1) & ~np.isnan(first)
    secs = np.where(split, total - first, total) / np.maximum(done - split, 1)
    start = np.where(split, np.maximum(first - secs, 0.0), 0.0)
    return float(np.where(quotas > 0, start + secs * quotas, 0.0).max())


def _followed(state: GuardState, secs: float) -> GuardState:
    """After a round of quotas of the policy's that are not judged: is a look due?"""
    if state.rounds <= state.wait - _WAIT:
        return state
    state = state._replace(
        forecasts=np.append(state.forecasts[1:], _round_secs(state.equal, state.clocks) / secs),
        recent_secs=np.append(state.recent_secs[1:], secs),
    )
    allowed = _SHARE * state.rounds + (_SLOWER - 1.0) * (state.wait == _WAIT)
    if state.rounds < state.wait or float(np.median(state.forecasts)) - 1.0 > allowed:
        return state
    unseen, equal_unseen = (np.full_like(x, np.nan) for x in (state.secs, state.equal_secs))
    return state._replace(looking=True, secs=unseen, equal_secs=equal_unseen)


def _looked(state: GuardState, secs: float) -> GuardState:
    """After a round of a look: is it decided?"""
    rounds, which = state.secs.copy(), int(state.kind == _EQUAL)
    rounds[which, np.count_nonzero(~np.isnan(rounds[which]))] = secs
    state = state._replace(secs=rounds)
    if which == 0:
        return state
    mean, error, count = _mean_cost(state.equal_secs[1], state.equal_secs[0], _SPREAD)
    recent = state.recent_secs  # their spread is that of the difference of two rounds, in rounds
    spread = max(_SPREAD, float(np.std(recent) / max(np.mean(recent), 1e-300)))
    longer, longer_error, _ = _mean_cost(rounds[0], rounds[1], spread)
    against = longer > _HELD * longer_error or mean > _HELD * error
    # Doubtful where equal rounds are shorter than the policy's last ones.
    doubtful = np.nanmean(rounds[1]) / np.median(recent) < 1.0 - spread
    if not against and (mean >= -_FOLLOWED * error or doubtful) and count < _MOST_ROUNDS:
        return state
    state = state._replace(looking=False, rounds=0)
    if against or mean >= 0 or (doubtful and longer > 0):
        hold = min(2 * state.hold, _LONGEST_HOLD)
        return state._replace(held=True, by_rounds=mean < 0, wait=state.hold, hold=hold)
    return state._replace(wait=min(_LONGER * state.wait, _LONGEST_WAIT), judged=state.wanted)


def _held(state: GuardState) -> GuardState:
    """After a round of held equal split: do its clocks speak for the policy's quotas?"""
    state = state._replace(rounds=state.rounds + 1)
    would, own = state.equal_secs[1], state.equal_secs[0]
    may_be_clear = not state.by_rounds and would[-_BURST:].sum() < own[-_BURST:].sum()
    if state.rounds < state.wait and not may_be_clear:  # as most rounds
        return state
    burst, burst_error, count = _mean_cost(would[-_BURST:], own[-_BURST:], _SPREAD)
    is_clear = count == _BURST and burst < -_HELD * burst_error and not state.by_rounds
    mean, error, _ = _mean_cost(would, own, _SPREAD)
    if is_clear or (state.rounds >= state.wait and mean < -_FOLLOWED * error):
        return state._replace(held=False, rounds=0, wait=_WAIT, judged=np.zeros_like(state.judged))
    return state


def _mean_cost(secs: np.ndarray, others: np.ndarray, spread: float) -> tuple[float, float, int]:
    """How much `secs` exceed `others` in the mean, in rounds: `(mean, standard error, count)`."""
    known = ~np.isnan(secs + others)
    count = int(known.sum())
    if not count:
        return 0.0, spread, 0
    usual = max(float(np.median(others[known])), 1e-300)
    costs = np.clip((secs[known] - others[known]) / usual, -_OUTLIER, _OUTLIER)
    mean = float(costs.mean())
    squares = ((costs - mean) ** 2).sum() + _SPREAD_ROUNDS * spread**2
    variance = squares / (max(count - 1, 1) + _SPREAD_ROUNDS)
    return mean, float(np.sqrt(variance / count)), count
