"""Processes that read a source, for Python code that holds the interpreter's lock.

Each is started anew (spawn), gets the source once, as a pickle, and then ids; it sends examples
back. A thread of the feed waits for each. So what is read, and in which parts, is as by threads.
"""

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import numpy as np

from hetjax.liveness import interrupts

_END_SECS = 5.0  # until a process that is told to end has ended
_BEGINS = "data.readers: a reader process needs `if __name__ == '__main__':` and classes in modules"

Read = Callable[[np.ndarray, int], Any]


class Processes:
    """Calls a function in one of several processes.

    Args:
        read: `(example_ids i64[k], pass_index) -> examples`; each process gets a copy.
        count: how many processes there are.

    Raises:
        ValueError: the function cannot be sent to a process, or none can be started.
    """

    def __init__(self, read: Read, count: int) -> None:
        self._free: queue.SimpleQueue[_One] = queue.SimpleQueue()
        self._all: list[_One] = []
        atexit.register(self.close)
        try:
            with _without_accelerators():
                self._all += [_One() for _ in range(count)]
            for one in self._all:
                one.begin(read)
                self._free.put(one)
        except BaseException:
            self.close()
            raise

    def __call__(self, example_ids: np.ndarray, pass_index: int = 0) -> Any:
        one = self._free.get()
        try:
            return one.ask(example_ids, pass_index)
        finally:
            self._free.put(one)

    def close(self) -> None:
        """Ends the processes."""
        atexit.unregister(self.close)
        for one in self._all:
            one.process.kill()
        for one in self._all:
            one.process.join(_END_SECS)


class _One:
    """One process, and the connection to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs,), name="hetjax-reader", daemon=True
        )
        self.process.start()
        theirs.close()  # so that its end is seen here

    def begin(self, read: Read) -> None:
        """Hands the source over and waits until it is there."""
        try:
            self._ours.send(read)
            wrong = self._ours.recv()
        except (EOFError, ConnectionError):
            raise ValueError(f"{_BEGINS}; it ended as it began ({self._code()})") from None
        except Exception as error:
            raise ValueError(
                "data.readers: the source cannot be sent to a process "
                f"({type(error).__name__}: {error})"
            ) from error
        if wrong:
            raise ValueError(f"{_BEGINS}; it cannot make the source of its pickle ({wrong})")

    def ask(self, example_ids: np.ndarray, pass_index: int) -> Any:
        """The examples, as that process has read them."""
        try:
            self._ours.send((example_ids, pass_index))
            is_read, answer = self._ours.recv()
        except (EOFError, OSError):
            first, last = int(example_ids[0]), int(example_ids[-1])
            raise ValueError(
                f"data.readers: a reader process ended ({self._code()}) while it read examples "
                f"{first} to {last}; each holds a copy of the source"
            ) from None
        if is_read:
            return answer
        raise ValueError(answer)

    def _code(self) -> str:
        self.process.join(_END_SECS)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _serve(theirs: connection.Connection) -> None:
    """What a process does: reads what it is asked for, until the asking one is gone."""
    for number in interrupts.ENDS:  # it ends the run, which ends this
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        try:
            read = theirs.recv()
        except EOFError:
            return
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")
            return
        theirs.send("")
        while True:
            asked = theirs.recv()
            try:
                answer = True, read(*asked)
            except Exception as error:
                answer = False, str(error) or type(error).__name__
            theirs.send(answer)


@contextlib.contextmanager
def _without_accelerators() -> Iterator[None]:
    """Processes that are started meanwhile take no memory of a GPU, whatever their program does."""
    name = "JAX_PLATFORMS"
    before = {name: os.environ[name]} if name in os.environ else {}
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update(before)
