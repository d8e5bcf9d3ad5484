"""What reaches the referee of a run and moves arrays between its members, on one machine or many.

`local_carrier` is that of one machine, `hetjax.ray` has another. Small values that all members see
lie with the referee, too (`HostStore`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Carrier:
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
        """Puts up bytes, u8[n], until `let_go`; they may die with this process. A handle."""

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
        """The bytes, to be read while they are held; None where some are gone, or where this
        attempt (round, attempt) is over.

        Args:
            handles: of `put`, of any process.
            over: (round, attempt).
            moved: called with the bytes that have come.
        """
        raise NotImplementedError


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
    """Small values that all members see, in place of JAX's client: the host has its methods.

    Args:
        ask: gives what a method of `RefereeHost` returns.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self._ask, method)
