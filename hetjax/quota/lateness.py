"""Workers whose rounds are very late at times: which are spared, which owe, and which are left out.

Late is a round that is slower than noise explains, unless all were so slow. Who was late gets one
microbatch in the next round. Heavy is a round that takes many others, and a debt: each later round
pays the worker's part of what the others' work took, which is what leaving it out costs. Who is
heavy again before it has paid is left out until then, if its heavy rounds cost more than those of
the others. So none is left out where all are late at times.
"""

from typing import NamedTuple

import numpy as np

from hetjax.quota import estimate, fitted, policies

_KNOWN = 8  # rounds of a worker after which its noise is known
_LATE, _LATE_NOISE = 4.0, 6.0  # times slower than usual, and standard deviations, of a late round
_HEAVY = 12.0  # rounds that a late one takes; from then on it is a debt
_KEPT = 0.999  # part of what heavy rounds cost that is remembered each round
_WORSE = 3.0  # times what others lost in the mean; 2: rare hiccups cost 6 %, 4: two bad ones stay


class Lateness(NamedTuple):
    """What is known of the late rounds of n workers."""

    late: np.ndarray  # bool[n], whether its last round was late: the next may be, too
    debt: np.ndarray  # f64[n], rounds that its heavy ones cost beyond what its work saved since
    left_out: np.ndarray  # bool[n], heavy again while it owed some: no work until that is paid
    lost: np.ndarray  # f64[n], rounds that its heavy ones cost, older ones ever less


def none(num_workers: int) -> Lateness:
    """Before the first round."""
    no, zeros = np.zeros(num_workers, bool), np.zeros(num_workers)
    return Lateness(no, zeros, no, zeros)


def spared(lateness: Lateness, caps: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Returns at most how many microbatches each worker gets, i64[n].

    Args:
      lateness: of the rounds so far.
      caps: i64[n], what is allowed otherwise.
      given: bool[n], who gets some for its work, not to be seen.
    """
    caps = np.where(lateness.late, np.minimum(caps, 1), caps)
    return np.where(lateness.left_out & given, 0, caps)


def after(
    lateness: Lateness,
    before: fitted.FittedState,
    own: fitted.FittedState,
    times: policies.RoundTimes,
    given: np.ndarray,
    takes_part: np.ndarray,
) -> Lateness:
    """Returns what is known after k rounds; of more than one none was late.

    Args:
      lateness: of the rounds before.
      before: the costs before these.
      own: the costs after them.
      times: of these, [k, n].
      given: bool[n], who gets some for its work, not to be seen.
      takes_part: bool[n], which may get some.
    """
    done, compute_secs = times.microbatches_done[-1], times.compute_secs[-1]
    kept, busy = _KEPT ** len(times.compute_secs), done > 0
    expected = (before.overhead_secs + before.secs_per_microbatch * done) * own.pace
    least = np.maximum(_LATE, np.exp(_LATE_NOISE * estimate.noise(before.watch)))
    used = busy & (before.watch.rounds >= _KNOWN) & given
    late = used & (compute_secs > least * np.where(used, expected, np.inf))
    usual = np.where(busy, np.nan_to_num(expected), 0.0).max() or np.inf
    rounds = compute_secs / usual
    heavy = busy & (before.seen > fitted.LITTLE) & (rounds > _HEAVY)
    late |= (heavy & given) | (lateness.late & ~busy)
    known = takes_part & ~np.isnan(own.secs_per_microbatch)
    speeds = np.where(known, 1.0 / np.where(known, own.secs_per_microbatch, 1.0), 0.0)
    working = np.where(lateness.left_out, 0.0, speeds)
    most = rounds == rounds.max()
    longest = np.where(most, np.sort(rounds)[-2:][0], rounds.max())  # of the others
    of_others = working.sum() - working
    share = np.divide(speeds, of_others, where=of_others > 0, out=np.full_like(speeds, np.inf))
    owed = np.maximum(lateness.debt - share * np.maximum(longest, 1.0), 0.0)
    cost = np.where(heavy, rounds - 1.0, 0.0)
    others_lost = lateness.lost.sum() - lateness.lost
    is_worse = lateness.lost * (done.size - 1) > _WORSE * others_lost
    left_out = (lateness.left_out | (heavy & ~lateness.late & is_worse)) & (owed > 0.0)
    return Lateness(late, owed + cost, left_out, kept * (lateness.lost + cost))
