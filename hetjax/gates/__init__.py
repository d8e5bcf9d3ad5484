"""Gates: what closes a round before every quota is done.

- `gate` says what a gate is and how one closes a round, by threads that poll or on a virtual clock.
- `triggers` are the factories, by name in `GATES`.
- `agreement` checks that a gate's two forms agree.

The times at which workers finish go in; whether a worker may begin its next microbatch comes out.
Imports `parts`; needs only NumPy, never JAX.
"""

from collections.abc import Callable

from hetjax import parts
from hetjax.gates.agreement import Clock as Clock
from hetjax.gates.agreement import check as check
from hetjax.gates.agreement import play as play
from hetjax.gates.gate import AlwaysOpen as AlwaysOpen
from hetjax.gates.gate import Board as Board
from hetjax.gates.gate import Closing as Closing
from hetjax.gates.gate import Gate as Gate
from hetjax.gates.gate import Live as Live
from hetjax.gates.gate import begin as begin
from hetjax.gates.gate import close as close
from hetjax.gates.triggers import deadline as deadline
from hetjax.gates.triggers import first as first
from hetjax.gates.triggers import none as none
from hetjax.gates.triggers import quorum as quorum

GATES: dict[str, Callable[..., Gate]] = parts.by_name(none, first, quorum, deadline)
