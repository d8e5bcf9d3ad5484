"""Pages that several tests read, each drawn once."""

import pytest

from tests.report import runs

RUNS = {  # (summary, history): every kind of timeline and of quota picture, a gate, and gossip
    "one round": (runs.SUMMARY, runs.make_history(1, 16, rounds_per_epoch=7)),
    "one worker": ({}, runs.make_history(7, 1, rounds_per_epoch=7)),
    "eight workers": (runs.SUMMARY, runs.make_history(7, 8, rounds_per_epoch=7)),
    "many workers": ({}, runs.make_history(7, 64, rounds_per_epoch=7)),
    "gate": (runs.SUMMARY | {"gate": runs.GATE}, runs.make_gated_history(8, 4)),
    "gossip": (
        runs.SUMMARY | {"gossip": runs.GOSSIP, "bytes_sent_per_round": 4 * 248_024.0},
        runs.make_gossip_history(8, 4),
    ),
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The page of each of `RUNS`."""
    return {
        name: runs.write(tmp_path_factory.mktemp("page"), summary=summary, history=history)
        for name, (summary, history) in RUNS.items()
    }
