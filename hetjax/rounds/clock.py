"""When the rounds of an engine begin and end, by this process's clock.

A round ends when the next one begins, or is settled before a pause. Its exchange goes from the end
of the local phase to the beginning of the next one, less the gathering, which waits for the slowest
worker. What the host needs between two local phases is no time of its workers' computing.
"""

import time

from hetjax.rounds import round_report


class Clock:
    """The clock of one engine; its moments are called in the order in which they stand here."""

    def __init__(self) -> None:
        self.last: round_report.Report | None = None
        """Of the round before, which may not be over yet."""
        self._began = time.perf_counter()
        self._at = dict.fromkeys(("computed", "posted", "gathered"), self._began)
        self._tail_secs = 0.0  # of the last round, after its gathering

    def begins(self, began: float) -> None:
        """A round began then; the last one ended with it."""
        self._began = began
        if self.last is not None:
            self.last.end(began)

    def computes(self) -> None:
        """The workers have begun: what they begin with, the last round's exchange has made."""
        if self.last is not None:
            self.last.exchanged(self._exchange_secs(time.perf_counter()))

    def stamp(self, moment: str) -> None:
        """Notes when the local phase was over (`computed`), when what the workers contributed was
        where the others find it (`posted`), and when all knew what all have done (`gathered`)."""
        self._at[moment] = time.perf_counter()

    def host_secs(self, longest_secs: float) -> float:
        """What the host needed since the last gathering, beside its longest worker."""
        return self._tail_secs + self._at["posted"] - self._began - longest_secs

    def closes(self) -> None:
        """The host has done what it does after the gathering; a pass may follow, or a round."""
        self._began = time.perf_counter()
        self._tail_secs = self._began - self._at["gathered"]

    def settled(self, since: float) -> None:
        """The last round is over; the host waited for it since then."""
        assert self.last is not None
        now = time.perf_counter()
        self._tail_secs += now - since
        self.last.exchanged(self._exchange_secs(now))
        self.last.end(now)

    def _exchange_secs(self, now: float) -> float:
        return now - self._at["gathered"] + self._at["posted"] - self._at["computed"]
