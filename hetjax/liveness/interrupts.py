"""Signals that ask for the end of a run: it ends between two rounds, with its files written."""

import contextlib
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

ENDS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
"""Of several that have come the first one here ended the run. A scheduler's warning, for which a
program may have a handler, comes before the SIGTERM that follows it."""


@contextlib.contextmanager
def deferred(unit: str = "round") -> Iterator[Callable[[], signal.Signals | None]]:
    """Turns each signal of `ENDS` into a request; a second Ctrl-C interrupts at once.

    Args:
        unit: what is done to its end before the run ends.

    Yields:
        A function that tells which signal came, if any. Outside the main thread Python lets
        no code handle signals, so there it always returns None.
    """
    came: list[signal.Signals] = []

    def first() -> signal.Signals | None:
        return min(came, key=ENDS.index, default=None)

    if threading.current_thread() is not threading.main_thread():
        yield first
        return

    def handle(number: signal.Signals, frame: Any) -> None:
        if number == signal.SIGINT and number in came:
            signal.default_int_handler(number, frame)
        came.append(number)
        text = f"{number.name}: ending after this {unit}."
        if number == signal.SIGINT:
            text = f"\nCtrl-C: ending after this {unit}; once more to stop at once."
        print(text, file=sys.stderr, flush=True)

    with handled_by(handle):
        yield first


@contextlib.contextmanager
def handled_by(handler: Callable[[signal.Signals, Any], None]) -> Iterator[None]:
    """Has a function handle the signals of `ENDS` inside the context, in the main thread.

    What is ignored stays ignored, as SIGHUP by nohup; but a shell ignores SIGINT for what it starts
    in the background, and means nothing by it. What C code handles is its own, such as the dump of
    `faulthandler.register`; but JAX's handler of SIGTERM is replaced.
    """
    caught = 0
    with contextlib.suppress(OSError, IndexError):  # only Linux says it
        status = pathlib.Path("/proc/self/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    before = {number: signal.getsignal(number) for number in ENDS}
    for number, own in list(before.items()):
        is_of_c = own is signal.SIG_DFL and caught >> (number - 1) & 1 and number != signal.SIGTERM
        if number != signal.SIGINT and (own in (None, signal.SIG_IGN) or is_of_c):
            del before[number]
        else:
            signal.signal(number, lambda number, frame: handler(signal.Signals(number), frame))
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def hand_on(number: signal.Signals) -> bool:
    """Calls the handler that the program itself has for a signal; whether there is one.

    Ctrl-C is a KeyboardInterrupt in any case.
    """
    if has_one := number != signal.SIGINT and callable(signal.getsignal(number)):
        signal.raise_signal(number)
    return has_one
