"""Small values that all processes of a run see.

The coordination service of `jax.distributed` has no public interface for them; what is private is
used here and nowhere else.
"""

import collections
import json
from typing import Any

_MOST_BYTES = 4096  # of a value on the board
_PART = 1500  # characters of a long value; as JSON in JSON they may double
_boards: collections.Counter[str] = collections.Counter()  # made in this process, by name


class Board:
    """Small JSON values that all processes of a run see; 0.3 to 0.4 ms a call.

    Each board has keys of its own: what one process puts up under a name, the others see on their
    board of that name. Of one name, all processes make their boards in the same order.

    Args:
        name: what it is for.

    Raises:
        RuntimeError: this process belongs to no run of several.
    """

    def __init__(self, name: str) -> None:
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("Board: this process is alone; call hetjax.join_processes first")
        self._client: Any = client
        self._prefix = f"hetjax/{name}/{_boards[name]}/"
        _boards[name] += 1

    def post(self, key: str, value: Any) -> None:
        """Puts up a value; one that is there is replaced."""
        text = json.dumps(value, allow_nan=False)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"Board: {key!r} has {len(text)} bytes, at most {_MOST_BYTES} go")
        self._client.key_value_set(self._prefix + key, text, allow_overwrite=True)

    def read(self, key: str) -> Any:
        """The value that is there now; None where there is none."""
        try:
            text = self._client.key_value_try_get(self._prefix + key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return _checked(text)

    def wait(self, key: str, timeout_secs: float) -> Any:
        """The value, as soon as it is there.

        Raises:
            TimeoutError: it was not in time.
        """
        try:
            milliseconds = int(timeout_secs * 1000)
            text = self._client.blocking_key_value_get(self._prefix + key, milliseconds)
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"nobody put up {key!r} in {timeout_secs:g} s") from error
            raise
        return _checked(text)

    def post_long(self, key: str, value: Any) -> None:
        """Puts up a value of any size, in parts, under a key that has none yet."""
        text = json.dumps(value, allow_nan=False)
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        for number, part in enumerate(parts):
            self.post(f"{key}/{number}", part)
        self.post(key, len(parts))

    def wait_long(self, key: str, timeout_secs: float) -> Any:
        """What `post_long` put up, as soon as it is there.

        Raises:
            TimeoutError: it was not in time.
        """
        count = self.wait(key, timeout_secs)
        return json.loads("".join(self.read(f"{key}/{number}") for number in range(count)))

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0; its new value."""
        return int(self._client.key_value_increment(self._prefix + key, amount))

    def remove(self, key: str) -> None:
        """Takes a value away; nothing happens where there is none."""
        self._client.key_value_delete(self._prefix + key)


def _checked(text: str) -> Any:
    if len(text) > _MOST_BYTES:
        raise ValueError(f"Board: a value has {len(text)} bytes, at most {_MOST_BYTES} go")
    return json.loads(text)
