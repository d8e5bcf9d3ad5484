"""What decides the quotas of the next round?

A policy is a `QuotaPolicy(init, assign, observe)` of pure functions over a state, as an optax
optimiser is. The state is a NamedTuple of NumPy arrays and numbers. So a checkpoint can hold it,
and every process that has the same numbers computes the same quotas. This module has the contract,
what a run asks of any policy, also a user's, with answers that are checked before a worker computes
by them, and the policies that need no cost model; `adaptive.py` is the one with a cost model.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import numpy as np

from hetjax import parts
from hetjax.quota import estimate, solver


class _Times(NamedTuple):
    microbatches_done: np.ndarray
    first_secs: np.ndarray
    compute_secs: np.ndarray
    present: np.ndarray


class RoundTimes(_Times):
    """What each worker did in a round, by its own clock. Waiting for others is no part of it.

    Args:
      microbatches_done: i64[n].
      first_secs: f64[n], start of the round to end of the first microbatch; NaN: unknown.
      compute_secs: f64[n], to the end of the last one; 0 if it did nothing.
      present: bool[n], which workers were there; None: all. The zeros of the others are no times.

    Example:
      >>> times = RoundTimes(np.array([0, 3]), np.full(2, np.nan), np.array([0.0, 6.0]))
      >>> times.present.tolist()
      [True, True]
    """

    __slots__ = ()

    def __new__(
        cls,
        microbatches_done: np.ndarray,
        first_secs: np.ndarray,
        compute_secs: np.ndarray,
        present: np.ndarray | None = None,
    ) -> "RoundTimes":
        here = np.ones(np.shape(microbatches_done), bool) if present is None else present
        return super().__new__(cls, microbatches_done, first_secs, compute_secs, here)


class QuotaPolicy(NamedTuple):
    """A policy: three pure functions over its own state.

    - `init(num_workers, budget) -> state`.
    - `assign(state, total, caps) -> (quotas i64[n], state)`: quotas ≤ caps with sum `total`. The
      total is the budget, except in an epoch's last round, whose quotas are not kept. Those of a
      round in which a cap is lower for once are not kept, either. A cap of 0 is an absent worker;
      one whose cap is positive again has joined, as if never seen.
    - `observe(state, times) -> state`: takes the `RoundTimes` of the round just done. Its
      `times.present` says which workers were there.

    A state is a pytree of NumPy arrays and numbers. A checkpoint holds it, so its structure, shapes
    and dtypes stay what `init` made. A run refuses a policy that changes them.

    The other fields are what a run asks of it; the defaults are right for most.
    """

    init: Callable[[int, int], Any]
    assign: Callable[[Any, int, np.ndarray], tuple[np.ndarray, Any]]
    observe: Callable[[Any, RoundTimes], Any]

    proportions: tuple[float, ...] | None = None
    """f64[n], of a policy whose quotas always follow them: private shards are cut by them, too."""

    of_epochs: Callable[[int], "QuotaPolicy"] | None = None
    """`rounds -> policy` of a run with so many rounds an epoch; None: that does not matter."""

    problems: Callable[[parts.Facts], Iterable[str]] = parts.no_problems
    """Why it cannot work in a run: lines that begin with the option's name."""

    made_by: parts.Made | None = None


def with_options(options: Any, init: Callable, assign: Callable, observe: Callable) -> QuotaPolicy:
    """The policy whose functions are given its options first."""
    bound = functools.partial
    return QuotaPolicy(bound(init, options), bound(assign, options), bound(observe, options))


def assigned(
    policy: QuotaPolicy, state: Any, total: int, caps: np.ndarray
) -> tuple[np.ndarray, Any]:
    """The quotas of a round, and the policy's state after it has assigned them.

    Args:
      policy: that assigns them.
      state: its state.
      total: microbatches of the round.
      caps: i64[n]; 0 of an absent worker.

    Returns:
      `(quotas i64[n], state)`; the quotas are a copy.

    Raises:
      ValueError: the quotas are no whole numbers from 0 to the caps whose sum is `total`.
    """
    answer = policy.assign(state, total, caps.copy())
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    quotas = parts.array_of(answer[0] if is_pair else None)
    is_right = quotas.shape == caps.shape and quotas.dtype.kind in "iu"
    if is_right and quotas.sum() == total and (quotas >= 0).all() and (quotas <= caps).all():
        return quotas.astype(np.int64), answer[1]
    got = parts.shown(answer[0]) if is_pair else f"{parts.shown(answer)} and no pair"
    raise ValueError(
        f"quota: the policy {parts.named(policy)}: assign(state, total={total}, caps="
        f"{caps.tolist()}) returned {got}; quotas are whole, within the caps, of sum total"
    )


def of_epochs(policy: QuotaPolicy, rounds: int) -> QuotaPolicy:
    """The policy of a run whose epochs have so many rounds.

    Raises:
      ValueError: its `of_epochs` made something else.
    """
    made = policy if policy.of_epochs is None else policy.of_epochs(rounds)
    if not isinstance(made, QuotaPolicy):
        raise ValueError(
            f"quota: the policy {parts.named(policy)}: of_epochs({rounds}) returned "
            f"{parts.shown(made)} and no hetjax.quota.QuotaPolicy"
        )
    return made


def shard_proportions(policy: QuotaPolicy, num_workers: int) -> tuple[float, ...] | None:
    """The proportions by which private shards are cut; None: equal ones.

    Raises:
      ValueError: there is not one for each worker, or they are no proportions.
    """
    given = policy.proportions
    found = parts.array_of(given)
    is_right = found.shape == (num_workers,) and found.dtype.kind in "fiu"
    if given is None or (is_right and np.isfinite(found).all() and found.min() >= 0 < found.sum()):
        return given
    raise ValueError(
        f"quota: the policy {parts.named(policy)}: its proportions are {parts.shown(given)}, not "
        f"{num_workers} numbers, 0 or more and not all 0"
    )


@parts.factory
def equal() -> QuotaPolicy:
    """The same quota for every worker that is present: what plain data parallelism does.

    Example:
      >>> policy = equal()
      >>> quotas, _ = policy.assign(policy.init(3, 8), 8, np.array([8, 8, 8]))
      >>> quotas.tolist()
      [3, 3, 2]
    """
    return _in_proportion(())


class StaticState(NamedTuple):
    proportions: np.ndarray  # f64[n]


@parts.factory
def static(
    proportions: Annotated[
        tuple[float, ...],
        parts.numbers(at_least=0.0, says="speeds, one for each worker; (): all equal"),
    ] = (),
) -> QuotaPolicy:
    """Quotas in given proportions, for workers whose speeds are known and stay as they are.

    b_i is B·r_i/Σr by largest remainder, over the workers present. Pass speeds (examples a
    second), not times.

    Args:
      proportions: f64[n], ≥ 0; empty: all equal.

    Raises:
      ValueError: a proportion is not allowed; from `init`: their number is not the number of
        workers, or all are 0.

    Example:
      >>> policy = static([4, 3, 2, 1])
      >>> quotas, _ = policy.assign(policy.init(4, 20), 20, np.full(4, 20))
      >>> quotas.tolist()
      [8, 6, 4, 2]

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272: static allocation.
    """

    def problems(facts: parts.Facts) -> Iterable[str]:
        n = facts.num_workers
        if len(proportions) != n:
            yield (
                f"proportions: got {proportions}, must be one for each of cluster.num_workers={n} "
                "with quota.policy='static'. Give speeds, such as "
                f"--config.quota.proportions={','.join(str(n - i) for i in range(n))}."
            )
        elif sum(proportions) <= 0:
            yield f"proportions: got {proportions}, one or more must be above 0. Give one a share."

    return _in_proportion(proportions)._replace(proportions=tuple(proportions), problems=problems)


def _in_proportion(proportions: tuple[float, ...]) -> QuotaPolicy:
    """Quotas in fixed proportions, by largest remainder; all equal if there are none."""

    def init(num_workers: int, budget: int) -> StaticState:
        check_sizes(num_workers, budget)
        given = np.asarray(proportions if len(proportions) else [1.0] * num_workers, float)
        if given.shape != (num_workers,):
            raise ValueError(
                f"proportions are {given.tolist()}; give one for each of the {num_workers} workers"
            )
        solver.largest_remainder(given, budget)
        return StaticState(given)

    def assign(state: StaticState, total: int, caps: np.ndarray):
        limits = np.asarray(caps, np.int64)
        return _divided(state.proportions.tobytes(), total, limits.tobytes()).copy(), state

    return QuotaPolicy(init, assign, lambda state, times: state)


@functools.lru_cache(maxsize=64)
def _divided(proportions: bytes, total: int, caps: bytes) -> np.ndarray:
    """By largest remainder, f64[n] and i64[n] given: most rounds divide the same as the last."""
    limits = np.frombuffer(caps, np.int64)
    return solver.largest_remainder(np.frombuffer(proportions), total, caps=limits)


class SpeedState(NamedTuple):
    budget: int
    weights: np.ndarray  # f64[n], what the quotas are in proportion to; NaN: not known yet
    kept: np.ndarray  # i64[n], the quotas of full rounds
    caps: np.ndarray  # i64[n], of the last assign
    done: np.ndarray  # i64[n], microbatches in this period
    secs: np.ndarray  # f64[n], compute in this period
    rounds: int  # in this period
    present: np.ndarray  # i64[n], rounds of this period in which the worker was there


PeriodRounds = Annotated[
    int,
    parts.integer(
        unit="full rounds",
        says="between two updates; 0: each epoch with 'proportional', each round with 'dead_band'",
    ),
]


@parts.factory
def proportional(*, period_rounds: PeriodRounds = 0) -> QuotaPolicy:
    """The plain self-adaptive rule: quotas in proportion to the measured speeds.

        b_i ← B · (b_i/t_i) / Σ_j (b_j/t_j)

    Overhead counts as slowness, so with overhead the rule needs several updates. Noise goes
    straight into the quotas. `adaptive` is the policy to use, this one to compare with.

    Args:
      period_rounds: full rounds between two updates; t_i is the mean over them. 1: every
        round; 0: every epoch of a run, and every round if there are no epochs.

    Raises:
      ValueError: the period is negative.

    References:
      Chao, Liao, Gao, "Task allocation for decentralized training in heterogeneous
      environment", 2021, arXiv 2111.08272, names the self-adaptive allocation. The formula is
      that of DBS (arXiv 2007.11831), here with sums that are exact.
    """

    def update(state: SpeedState) -> SpeedState:
        with np.errstate(divide="ignore", invalid="ignore"):
            speeds = np.where(state.done > 0, state.done / state.secs, state.weights)
        return state._replace(weights=speeds, kept=_quotas_for(speeds, state.budget, state.caps))

    of_epochs = None if period_rounds else functools.partial(_controller, update)
    return _controller(update, period_rounds or 1)._replace(of_epochs=of_epochs)


@parts.factory
def dead_band(
    *,
    band: Annotated[
        float, parts.number(at_least=0.0, below=1.0, says="least relative change that is acted on")
    ] = 0.2,
    gain: Annotated[
        float, parts.number(above=0.0, says="part of the difference that is corrected at once")
    ] = 1.0,
    period_rounds: PeriodRounds = 0,
) -> QuotaPolicy:
    """A proportional controller on the quotas that ignores small changes.

        b_i ← b_i − gain · (b_i/t_i) · (t_i − mean t), only if some b_i changes by more than
        `band` of itself

    Workers stay up to a band apart for good. It is something to compare with.

    Args:
      band: the least relative change of a quota that is acted on, below 1.
      gain: how much of the difference to the mean time is corrected at once.
      period_rounds: full rounds between two looks; t_i is the mean over them. 0: 1.

    Raises:
      ValueError: an option is out of range.

    References:
      Tyagi, Sharma, "OmniLearn: A framework for distributed deep learning over heterogeneous
      clusters", 2025, arXiv 2503.17469. There the sum of the batches drifts; here it is kept.
    """

    def update(state: SpeedState) -> SpeedState:
        busy = (state.done > 0) & (state.caps > 0)
        if not busy.any():
            return state
        speeds = np.full(busy.shape, np.nan)
        speeds[busy] = state.done[busy] / state.secs[busy]
        held = np.where(busy, state.done, np.nan) / np.maximum(state.present, 1)
        secs = held / speeds
        wanted = np.maximum(held - gain * speeds * (secs - np.nanmean(secs)), 0.0)
        if np.nanmax(np.abs(wanted - held) / held) <= band or not np.nansum(wanted):
            return state
        return state._replace(weights=wanted, kept=_quotas_for(wanted, state.budget, state.caps))

    return _controller(update, period_rounds or 1)


def _controller(update: Callable[[SpeedState], SpeedState], period_rounds: int) -> QuotaPolicy:
    """A policy that keeps its quotas and updates them after every period."""

    def init(num_workers: int, budget: int) -> SpeedState:
        check_sizes(num_workers, budget)
        zeros = np.zeros(num_workers, np.int64)
        unknown = np.full(num_workers, np.nan)
        return SpeedState(budget, unknown, zeros, zeros, zeros, np.zeros(num_workers), 0, zeros)

    def assign(state: SpeedState, total: int, caps: np.ndarray):
        caps = np.asarray(caps, np.int64)
        joined, changed = (state.caps == 0) & (caps > 0), (state.caps != caps).any()
        if changed:
            unseen, fields = init(caps.size, state.budget), ("weights", "done", "secs", "present")
            state = estimate.with_fields_of(unseen, state, joined, fields)._replace(caps=caps)
        if total != state.budget:
            return _quotas_for(state.weights, total, caps), state
        if changed or state.kept.sum() != total or (state.kept > caps).any():
            state = state._replace(kept=_quotas_for(state.weights, total, caps))
        return state.kept.copy(), state

    def observe(state: SpeedState, times: RoundTimes) -> SpeedState:
        done = state.done + times.microbatches_done
        secs = state.secs + np.where(times.microbatches_done > 0, times.compute_secs, 0.0)
        here = state.present + (state.caps > 0)
        state = state._replace(done=done, secs=secs, rounds=state.rounds + 1, present=here)
        if state.rounds < period_rounds:
            return state
        zeros, nothing = np.zeros_like(done), np.zeros_like(secs)
        return update(state)._replace(done=zeros, secs=nothing, rounds=0, present=zeros)

    return QuotaPolicy(init, assign, observe)


def _quotas_for(weights: np.ndarray, total: int, caps: np.ndarray) -> np.ndarray:
    """Quotas in proportion to weights; an unknown worker counts as the mean of the known ones."""
    present = caps > 0
    known = present & ~np.isnan(weights)
    filled = np.where(known, weights, weights[known].mean() if known.any() else 1.0)
    if not filled[present].any():
        filled = np.ones_like(filled)
    weights = np.where(present, filled, 0.0) + ~present.any()
    return solver.largest_remainder(weights, total, caps=caps)


def check_sizes(num_workers: int, budget: int) -> None:
    """Refuses a cluster without workers and a round without microbatches."""
    for name, number in (("num_workers", num_workers), ("budget", budget)):
        parts.integer(at_least=1).check(name, number)
