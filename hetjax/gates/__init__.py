"""Gates: what closes a round before every quota is done. NumPy alone."""

from collections.abc import Callable

from hetjax.gates.gate import AlwaysOpen, Board, Closing, Gate, Live, begin, close
from hetjax.gates.triggers import deadline, first, none, quorum

GATES: dict[str, Callable[..., Gate]] = {
    "none": none,
    "first": first,
    "quorum": quorum,
    "deadline": deadline,
}

__all__ = [
    "GATES",
    "AlwaysOpen",
    "Board",
    "Closing",
    "Gate",
    "Live",
    "begin",
    "close",
    "deadline",
    "first",
    "none",
    "quorum",
]
