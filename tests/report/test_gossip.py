"""The section on gossip: how far the replicas are apart, and whose loss is whose."""

import pytest

from hetjax.report import files, gossip
from tests.report import runs


def test_the_section_draws_the_consensus_and_says_what_it_is(pages):
    shown = runs.section(pages["gossip"], "Gossip")
    assert shown.count("<svg") == 2  # for wide and narrow screens
    assert "consensus distance, relative to the norm of the mean, log scale" in shown
    assert ">0.0625</text>" in shown  # the last one
    assert "at the end of each epoch" in shown
    assert "The spectral gap is 0.25: mixing alone would leave at most 75.0 %" in shown
    assert "Gossip has 3 exchanges" in shown
    assert "A worker sends 248 kB a round." in shown


def test_points_lie_at_the_ends_of_epochs():
    x, y = gossip.consensus(runs.make_gossip_history(6, 2), {})
    assert x.tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert y.tolist() == pytest.approx([0.25, 0.125, 0.5 / 6])


def test_without_gossip_there_is_no_section(tmp_path):
    for part in (None, {}):
        summary = runs.SUMMARY | {"gossip": part, "bytes_sent_per_round": 4 * 248_024.0}
        page = runs.write(tmp_path, summary=summary, history=runs.make_gossip_history(8, 4))
        assert not runs.section(page, "Gossip")


def test_bytes_are_those_of_one_worker_in_one_round():
    history = runs.make_gossip_history(4, 8)
    assert gossip.bytes_of_worker(files.so_far({}, history), history) == 248_024
    assert gossip.bytes_of_worker({"bytes_sent_per_round": 4000, "num_workers": 4}, []) == 1000
    alone = runs.make_gossip_history(4, 1)
    assert not gossip.bytes_of_worker({"bytes_sent_per_round": 0.0}, alone) >= 0
