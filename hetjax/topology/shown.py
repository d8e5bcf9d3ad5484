"""How does a graph show itself? A line of text, and in a notebook a card with its links."""

from typing import Any

import numpy as np


class Shown:
    """A graph of workers that shows itself."""

    name: str
    num_workers: int
    edges: np.ndarray

    def __repr__(self) -> str:
        facts = ", ".join(f"{number} {name}" for name, number in _facts(self))
        return f"{type(self).__name__} {self.name!r}: {facts}"

    def _repr_html_(self) -> str:
        """Its workers on a circle with their links; of a `PeriodicGraph` those of each phase."""
        from hetjax.report import cards

        workers, phases = np.arange(self.num_workers), getattr(self, "phases", None)
        if phases is None:
            links: list[Any] = [self.edges]
        else:
            links = [np.stack([phase, workers], axis=1)[phase != workers] for phase in phases]
        return cards.of_links(
            f"{type(self).__name__} {self.name!r}",
            _facts(self),
            self.num_workers,
            [(pairs.tolist(), None) for pairs in links],
            in_turn=phases is not None,
        )


def _facts(graph: Any) -> list[tuple[str, str]]:
    found = [("workers", f"{graph.num_workers:,}")]
    if hasattr(graph, "phases"):
        return [*found, ("phases in turn", str(len(graph.phases)))]
    low, high = int(graph.degrees.min()), int(graph.degrees.max())
    degrees = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return [*found, ("links", f"{len(graph.edges):,}"), ("neighbours of a worker", degrees)]
