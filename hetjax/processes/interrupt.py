"""Ctrl-C and SIGTERM end a run between two rounds, with its files written."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred(unit: str = "round") -> Iterator[Callable[[], signal.Signals | None]]:
    """Turns the first Ctrl-C, or SIGTERM, into a request; a second Ctrl-C interrupts at once.

    Args:
        unit: what is done to its end before the run ends.

    Yields:
        A function that tells which signal came first, if any. Outside the main thread Python lets
        nobody handle signals, so there it always returns None.
    """
    came: list[signal.Signals] = []

    def first() -> signal.Signals | None:
        return came[0] if came else None

    if threading.current_thread() is not threading.main_thread():
        yield first
        return

    def handle(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and signal.SIGINT in came:
            signal.default_int_handler(signum, frame)
        came.append(signal.Signals(signum))
        if signum == signal.SIGINT:
            text = f"\nCtrl-C: ending after this {unit}; once more to stop at once."
        else:
            text = f"SIGTERM: ending after this {unit}."
        print(text, file=sys.stderr, flush=True)

    with handled_by(handle, (signal.SIGINT, signal.SIGTERM)):
        yield first


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, Any], None], signums: Iterable[signal.Signals]
) -> Iterator[None]:
    """Has a function handle these signals inside the context, in the main thread."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)
