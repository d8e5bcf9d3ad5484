"""Numbers that one process computes and all use, equal to the bit.

The last bits of what a numerical library returns depend on the processor. What is drawn from these
numbers decides which exchanges a round has, and two processes that disagree wait for each other
for ever. So the process of worker 0 solves, and the others read its numbers from the board. A
checkpoint keeps them, because the run may be resumed on another machine.
"""

import functools
from collections.abc import Callable
from typing import Any

from hetjax.comm import key_value_store as store_lib

Numbers = list[float]

_PATIENCE_SECS = 3600.0  # 10 s are usual; if process 0 ends, the wait ends at once


class BroadcastOnce:
    """What has been solved for a run, by problem.

    Args:
        store: one for solutions alone, where the run has several processes.
        leads: whether this process solves.
        kept: gives the solutions in the checkpoint that the run goes on from. It is called once,
            and only if there is a problem and this process solves.
    """

    def __init__(
        self,
        store: store_lib.KeyValueStore | None = None,
        *,
        leads: bool = True,
        kept: Callable[[], dict[str, Numbers]] = dict,
    ) -> None:
        self._leads, self._store, self._kept = leads, store, functools.cache(kept)
        self._found: dict[str, Numbers] = {}

    def __call__(self, problem: str, solve: Callable[[], Numbers]) -> Numbers:
        """The solution of a problem, the same in all processes. All of them have to call this.

        Args:
            problem: says everything that the solution depends on, as a name or a digest.
            solve: finds the solution; called in one process at most.

        Raises:
            ValueError: in the other processes, if `solve` raised in the one that solves.
        """
        if problem not in self._found:
            self._found[problem] = self._solved(problem, solve)
        return list(self._found[problem])

    def save(self) -> dict[str, Numbers]:
        """For a checkpoint: JSON holds every finite float to the bit."""
        return dict(self._found)

    def _solved(self, problem: str, solve: Callable[[], Numbers]) -> Numbers:
        if not self._leads:
            assert self._store is not None
            told: dict[str, Any] = self._store.wait(
                problem, _PATIENCE_SECS, what="find the numbers that it solves for all"
            )
            if "error" in told:
                raise ValueError(f"process 0 could not solve {problem!r}: {told['error']}")
            return told["numbers"]
        kept = self._kept()
        try:
            numbers = kept[problem] if problem in kept else solve()
        except Exception as error:
            if self._store is not None:  # otherwise the others would wait for it
                self._store.post(problem, {"error": f"{type(error).__name__}: {error}"})
            raise
        if self._store is not None:
            self._store.post(problem, {"numbers": numbers})
        return numbers
