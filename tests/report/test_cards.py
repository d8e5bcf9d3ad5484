"""What the last line of a notebook's cell shows: small, whole, and without a style sheet."""

import html.parser

import numpy as np
import pytest

from hetjax import simulate, topology
from hetjax.cluster import emulate
from hetjax.report import cards
from tests.report import runs


class Parser(html.parser.HTMLParser):
    """Sees that each element ends in its parent."""

    EMPTY = ("path", "use", "image", "rect", "circle")

    def __init__(self):
        super().__init__()
        self.open, self.names = [], set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def check(shown):
    """Of a card: well-formed, small, and nothing of the report's style sheet or of a script."""
    parser = Parser()
    parser.feed(shown)
    assert not parser.open
    assert not parser.names & {"style", "script", "iframe", "link", "html"}
    assert "var(" not in shown
    assert "class=" not in shown
    assert len(shown.encode()) <= cards.MOST_BYTES


def simulated(num_workers, **options):
    cluster = emulate.EmulatedCluster(
        tuple(np.linspace(1, 3, num_workers)), delay="shifted_exponential"
    )
    return simulate.simulate(
        "adaptive", cluster, budget=4 * num_workers, num_rounds=30, param_bytes=1000, **options
    )


@pytest.mark.parametrize("graph", list(topology.GRAPHS))
@pytest.mark.parametrize("num_workers", [1, 4, 64, 300])
def test_graphs_show_their_links(graph, num_workers):
    made = topology.make_graph(graph, num_workers)
    check(made._repr_html_())
    assert repr(made).count("\n") == 0
    assert f"{num_workers} workers" in repr(made)


def test_a_schedule_shows_its_numbers_and_links():
    edges = topology.make_graph("exponential", 8).edges
    schedule = topology.matcha_schedule(topology.decompose_matchings(edges, 8), 8, 0.5)
    check(schedule._repr_html_())
    assert f"rho                        {schedule.rho:.4g}" in repr(schedule)
    assert "10.0 of 20, in the mean" in repr(schedule)
    alone = topology.Schedule((), np.zeros(0), 0.0, 0.0, 0.0)
    check(alone._repr_html_())


@pytest.mark.parametrize("num_workers", [3, 200])
def test_a_simulation_shows_times_and_workers(num_workers):
    found = simulated(num_workers)
    check(found._repr_html_())
    assert found._repr_html_().count("<svg") == 3
    assert len(repr(found).splitlines()) <= 10
    assert f"{found.worker_microbatches.sum():,}, " in repr(found)


@pytest.mark.parametrize(
    ("num_rounds", "num_workers", "num_pictures"),
    [(0, 2, 0), (1, 1, 3), (3000, 8, 3), (3000, 32, 3), (300, 64, 2)],
)
def test_a_run_of_any_length_stays_small(num_rounds, num_workers, num_pictures):
    history = runs.make_history(num_rounds, num_workers)
    shown = cards.of_run("FitResult", [("a", "<b>")], summary=runs.SUMMARY, history=history)
    check(shown)
    assert "&lt;b&gt;" in shown
    assert shown.count("<svg") == num_pictures
