"""Who hears of all runs that begin in a context, beside their own callbacks?"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from hetjax.writers import records

Hears = Callable[[records.RunInfo, Any], None]
_hearers: contextvars.ContextVar[tuple[Hears, ...]] = contextvars.ContextVar("hearers", default=())


@contextlib.contextmanager
def heard_by(hears: Hears) -> Iterator[None]:
    """Runs that begin inside the context call it after each step, in every process.

    Args:
        hears: is given what writers know of the run, and the report that callbacks get.
    """
    before = _hearers.set((*_hearers.get(), hears))
    try:
        yield
    finally:
        _hearers.reset(before)


def callbacks(run: records.RunInfo) -> list[Callable[[Any], None]]:
    """What a run has to call that begins here.

    Args:
        run: that begins.
    """
    return [functools.partial(hears, run) for hears in _hearers.get()]
