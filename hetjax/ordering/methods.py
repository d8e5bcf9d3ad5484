"""The orderings by name: where an order comes from, and what of it runs on the devices."""

import functools
from collections.abc import Callable

from hetjax.ordering import matrix_free, orders, per_example
from hetjax.ordering.ordering import Observer, Options, Ordering

_DEFAULTS = Options()
# c of the random signs: about the largest that costs nothing on 10⁴ unit vectors, d = 16
# (bound of one worker after 10 epochs: 1.67 with sure signs; c = 0.3 1.68, 1 2.07, 3 3.14).
_RANDOM_SCALE = 0.3
_COORDINATED = ("all_reduce", "ring")  # replicas must be equal for a common running sum


def _unsigned(make_parts: Callable[[], orders.Parts], options: Options = _DEFAULTS) -> Ordering:
    del options
    return Ordering(*make_parts())


def _balanced(
    make_observer: Callable[[Options], Observer], options: Options = _DEFAULTS
) -> Ordering:
    observer = make_observer(options)
    reducers = _COORDINATED if observer.coordinated else None
    return Ordering(*orders.balanced(), observer=observer, reducers=reducers)


def random_reshuffling(options: Options = _DEFAULTS) -> Ordering:
    """A fresh permutation for each pass; private shards draw independently."""
    return _unsigned(orders.random_reshuffling, options)


def d_grab(options: Options = _DEFAULTS) -> Ordering:
    """Two-level balancing without gradients of single examples: the one to take for training."""
    return _balanced(matrix_free.two_level, options)


def frozen(options: Options = _DEFAULTS) -> Ordering:
    """`d_grab` for `freeze_after` passes; the order they lead to is kept for good."""
    inner = d_grab(options)
    parts = orders.Parts(inner.init, inner.place)
    kept = orders.frozen(parts, freeze_after=options.freeze_after)
    return Ordering(*kept, observer=inner.observer, reducers=inner.reducers)


ORDERINGS: dict[str, Callable[..., Ordering]] = {
    "random_reshuffling": random_reshuffling,
    "synchronised_reshuffling": functools.partial(_unsigned, orders.synchronised_reshuffling),
    "shuffle_once": functools.partial(_unsigned, orders.shuffle_once),
    "fixed_map": functools.partial(_unsigned, orders.fixed_map),
    "frozen": frozen,
    "grab": functools.partial(_balanced, per_example.grab),
    "grab_random_sign": functools.partial(
        _balanced, functools.partial(per_example.grab, random_scale=_RANDOM_SCALE)
    ),
    "pair_balance": functools.partial(_balanced, matrix_free.alone),
    "pair_balance_exact": functools.partial(_balanced, per_example.pair_balance),
    "d_grab": d_grab,
    "d_grab_exact": functools.partial(_balanced, per_example.d_grab),
}
"""Factories `(options: Options = _DEFAULTS) -> Ordering`."""
