"""Small values that all processes of a run see.

They lie in the coordination service of `jax.distributed`. Where each process has a JAX of its own,
the host of their referee has them (`carrier.HostStore`), and gives None where JAX raises.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from hetjax.comm import runtime
from hetjax.liveness import blocking_waits

_SLICE_SECS = 0.5  # after which a wait looks whether a process is still to come


class KeyValueStore:
    """JSON values that all processes of a run see; 0.3 to 0.4 ms a call.

    Each board has keys of its own: what one process puts up on its board of a name, the others see
    on theirs of that name. All processes have to make the boards of one name in the same order.

    Args:
        name: what it is for.

    Raises:
        RuntimeError: this process belongs to no run of several.
    """

    def __init__(self, name: str) -> None:
        own = runtime.current()
        self._client = own.client
        if self._client is None:
            raise RuntimeError(
                "KeyValueStore: this process is alone; call hetjax.join_processes first"
            )
        self._prefix = f"hetjax/{name}/{own.num_stores[name]}/"
        own.num_stores[name] += 1

    def _at(self, key: str) -> str:
        return self._prefix + key

    def post(self, key: str, value: Any) -> None:
        """Puts up a value, in place of one that is there."""
        text = json.dumps(value, allow_nan=False)
        self._client.key_value_set(self._at(key), text, True)  # it may be overwritten

    def settled(self, key: str, value: Any) -> Any:
        """Puts up a value where there is none yet; returns the one that stands."""
        with contextlib.suppress(Exception):  # it is there
            self._client.key_value_set(self._prefix + key, json.dumps(value, allow_nan=False))
        return self.read(key)

    def read(self, key: str) -> Any:
        """The value that is there now; None where there is none."""
        try:
            text = self._client.key_value_try_get(self._at(key))
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            text = None
        return text and json.loads(text)

    def read_all(self) -> dict[str, Any]:
        """All values that are there now, by key."""
        found = self._client.key_value_dir_get(self._prefix)
        return {key.removeprefix(self._prefix): json.loads(text) for key, text in found}

    def wait(
        self, key: str, timeout_secs: float, *, what: str = "put up a value", by: int = 0
    ) -> Any:
        """The value, as soon as it is there.

        Args:
            key: under which it is put up.
            timeout_secs: patience.
            what: the other process is to do, for `blocking_waits.Wait`.
            by: the process that puts it up.

        Raises:
            TimeoutError: the value did not come in time.
            LostProcessError: a process has ended meanwhile.
        """
        ends = time.monotonic() + timeout_secs
        with blocking_waits.Wait(what, lambda: [by]) as wait:
            while True:
                wait.check()
                left = ends - time.monotonic()
                millis = int(1000 * max(min(left, _SLICE_SECS), 0.001))
                try:
                    text = self._client.blocking_key_value_get(self._at(key), millis)
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                    text = None
                if text is not None:
                    return json.loads(text)
                if left <= _SLICE_SECS:
                    raise TimeoutError(f"no process posted {key!r} within {timeout_secs:g} s")

    def gather(
        self,
        process: int,
        value: Any,
        processes: Iterable[int],
        timeout_secs: float = 600.0,
        *,
        what: str,
    ) -> dict[int, Any]:
        """Puts up the value of this process, and returns those of all, once they are there.

        Args:
            process: this one.
            value: of it.
            processes: all that take part.
            timeout_secs: patience with each.
            what: each is to do, for `blocking_waits.Wait`.

        Raises:
            TimeoutError, LostProcessError: as of `wait`.
        """
        self.post(f"{process}", value)
        return {p: self.wait(f"{p}", timeout_secs, what=what, by=p) for p in processes}

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0, and returns its new value."""
        return int(self._client.key_value_increment(self._at(key), amount))

    def remove(self, key: str) -> None:
        """Takes a value away; nothing happens where there is none."""
        self._client.key_value_delete(self._at(key))


class RoundStore(KeyValueStore):
    """A board with keys of its own for each round.

    Args:
        name: what it is for.
        round_now: the number of the round, alike in all processes.
    """

    def __init__(self, name: str, round_now: Callable[[], int]) -> None:
        super().__init__(name)
        self._round_now = round_now
        self._used: dict[str, int] = {}  # of which round a key is

    def _at(self, key: str) -> str:
        now = self._round_now()
        own = super()._at(f"{now}/{key}")
        self._used[own] = now
        for old in [k for k, number in self._used.copy().items() if number < now - 1]:
            self._client.key_value_delete(old)  # all have left that round
            self._used.pop(old, None)
        return own
