"""Ctrl-C ends a run between two rounds, with its files written."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a request; a second one interrupts at once.

    Yields:
        A function that tells whether Ctrl-C was pressed. Outside the main thread, where Python
        lets nobody handle signals, it is always False.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return

    def handle(signum: int, frame: Any) -> None:
        if pressed.is_set():
            signal.default_int_handler(signum, frame)
        pressed.set()
        print(
            "\nCtrl-C: ending after this round; once more to stop at once.",
            file=sys.stderr,
            flush=True,
        )

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
