"""What reaches the referee of a run and moves arrays between its members, on one machine or many.

`local_carrier` is that of one machine, `hetjax.ray` has another. Small values that all members see
lie with the referee, too (`HostStore`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Carrier(Protocol):
    """Reaches the referee and moves arrays; an engine has one (`hetjax.ray`).

    Each method may raise a `LostRefereeError`.
    """

    shares_gpus: bool
    """Whether all processes of a machine see its GPUs, so that each takes one."""

    outlives: bool
    """Whether what a member puts up outlives it; `let_go` lets it lie for another round then."""

    lost_secs: float
    """Without an answer of the referee for so long a process ends."""

    def call(self, method: str, *args: Any) -> Any:
        """What a method of `RefereeHost` returns."""

    def room(self, num_bytes: int) -> np.ndarray:
        """Memory, u8[num_bytes], to write into what is put up next: then it is copied less."""
        return np.empty(num_bytes, np.uint8)

    def put(self, piece: np.ndarray) -> Any:
        """Puts up an array, until `let_go`; it may die with this process. Returns a handle."""

    def let_go(self) -> None:
        """The round is decided: nobody takes what was put up before."""

    def check_room(self, sums: int, state: int, members: int) -> None:
        """Looks whether members have room to put up sums of so many bytes, and one a state.

        Raises:
            ValueError: there is less.
        """

    def take(
        self, handles: Sequence[Any], over: tuple[int, int], moved: Callable[[int], None]
    ) -> list[np.ndarray] | None:
        """The arrays, to be read while they are held; None where one is gone, or where this attempt
        (round, attempt) is over.

        Args:
            handles: of `put`, of any process.
            over: (round, attempt).
            moved: called with the bytes that have come.
        """


class LostRefereeError(ConnectionError):
    """The referee is gone, or cannot be reached.

    Args:
        words: why.
        is_final: whether it is gone.
    """

    def __init__(self, words: str, *, is_final: bool) -> None:
        super().__init__(words)
        self.is_final = is_final


class HostStore:
    """Small values that all members see, with the interface of JAX's client.

    Args:
        ask: gives what a method of `RefereeHost` returns.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        if not self._ask("store", "set", key, text, allow_overwrite):
            raise FileExistsError(key)

    def key_value_try_get(self, key: str) -> str:
        if (text := self._ask("store", "get", key)) is None:
            raise KeyError(f"NOT_FOUND: {key}")
        return text

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return self._ask("store", "dir", prefix)

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        if (text := self._ask("wait_for", key, milliseconds / 1000)) is None:
            raise TimeoutError(f"DEADLINE_EXCEEDED: {key}")
        return text

    def key_value_increment(self, key: str, amount: int) -> int:
        return self._ask("store", "increment", key, amount)

    def key_value_delete(self, key: str) -> None:
        self._ask("store", "delete", key)
