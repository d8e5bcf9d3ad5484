"""Gates: what closes a round before every quota is done.

- `gate` says what a gate is and how one closes a round, by threads that poll or on a virtual clock.
- `triggers` are the factories, by name in `GATES`.
- `agreement` checks that a gate's two forms agree.

The times at which workers finish go in; whether a worker may begin its next microbatch comes out.
Imports `parts`; needs only NumPy, never JAX.
"""

from collections.abc import Callable

from hetjax.gates.agreement import Clock, check, play
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
    "Clock",
    "Closing",
    "Gate",
    "Live",
    "begin",
    "check",
    "close",
    "deadline",
    "first",
    "none",
    "play",
    "quorum",
]
