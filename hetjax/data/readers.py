"""Threads that read examples ahead, so that several reads wait for a slow disk or network at once.

Where `data.readers` is 'processes:N', each of the threads has a process read (`reader_processes`).

Reads are begun in the order in which they were asked for, and each is done once. Python runs one
thread at a time. So threads help as far as a read waits, or computes in a library that lets other
threads run meanwhile, as decoders of images and NumPy do.
"""

import concurrent.futures
import contextlib
import queue
import threading
from typing import Any, NamedTuple

import numpy as np

from hetjax.data import reader_processes

_PATIENCE_SECS = 0.2  # between two looks at whether the threads were closed


class Crew(NamedTuple):
    """Who reads a source."""

    size: int = 1
    processes: bool = False  # not threads


ALONE = Crew()
_PROCESSES = "processes:"


def asked(text: int | str) -> Crew:
    """Who is to read, by `data.readers`: a number of threads, or processes.

    Example:
        >>> asked("processes:4"), asked(8)
        (Crew(size=4, processes=True), Crew(size=8, processes=False))
    """
    if isinstance(text, str):
        return Crew(int(text.removeprefix(_PROCESSES)), processes=True)
    return Crew(text)


class Readers:
    """Threads that all call one function.

    They are daemons: a source that blocks for ever must not keep the process alive.

    Args:
        read: `(example_ids i64[k], pass_index) -> examples`; processes get copies of it.
        crew: how many there are, each with a process of its own or without. Where there is one
            thread, no other ever calls the function.

    Raises:
        ValueError: no processes can be had for it.
    """

    def __init__(self, read: reader_processes.Read, crew: Crew = ALONE) -> None:
        self._processes = reader_processes.Processes(read, crew.size) if crew.processes else None
        self._read, self._count = self._processes or read, crew.size
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        for _ in range(self._count):
            threading.Thread(target=self._work, name="hetjax-feed", daemon=True).start()

    def submit(self, example_ids: np.ndarray, pass_index: int = 0) -> concurrent.futures.Future:
        """Has examples read, as they are in a pass, after all that were asked for before."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._wanted.put((future, (example_ids, pass_index)))
        return future

    def result(self, future: concurrent.futures.Future) -> Any:
        """Waits for what was read and returns it; raises what the function raised.

        Raises:
            CancelledError: the threads were closed before it was read.
        """
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=_PATIENCE_SECS)
        raise concurrent.futures.CancelledError("the feed was closed")

    def close(self) -> None:
        """Has the threads end after what they are reading now; does not wait for them."""
        self._closing.set()
        for _ in range(self._count):
            self._wanted.put(None)
        if self._processes is not None:
            self._processes.close()

    def _work(self) -> None:
        while (task := self._wanted.get()) is not None:
            future, asked = task
            if self._closing.is_set() or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(*asked))
            except Exception as error:  # `result` raises it again
                future.set_exception(error)
