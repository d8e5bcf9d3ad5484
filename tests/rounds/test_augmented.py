"""Views that `augmented` makes: new in each epoch, the same in each run, whatever changes it."""

import collections
import os
import signal

import jax
import numpy as np
import pytest

import hetjax
from hetjax.data import feed, passes, sources
from tests.data import test_sources
from tests.rounds import problems

COUNT = 61  # a last microbatch that is not full
CLUSTER = {"num_workers": 4, "secs_per_microbatch": (1.0, 2.0, 3.0, 4.0), "clock": "virtual"}


def noisy(example, rng):
    example["x"] += rng.normal(size=problems.FEATURES).astype(np.float32)  # into a copy
    return example


def rows():
    data = problems.given(COUNT)[0]
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def fit(source, **fields):
    weights = problems.initial_weights(np.float32)
    fields = {"epochs": 3, "cluster": CLUSTER, **fields}
    return problems.fit(source, weights, **fields)


def by_hand(source, epoch, index, seed=0):
    """The view of an example, as the page says that it is made."""
    rng = np.random.default_rng((seed, epoch, index))
    noise = rng.normal(size=problems.FEATURES).astype(np.float32)
    return source[index]["x"] + noise


def test_an_example_has_a_view_of_its_own_in_each_epoch_and_the_data_stay():
    given, seen = rows(), collections.defaultdict(list)
    before = [row["x"].copy() for row in given]

    def noted(example, rng):
        index = next(i for i, x in enumerate(before) if np.array_equal(x, example["x"]))
        view = noisy(example, rng)
        seen[index].append(view["x"].tobytes())
        return view

    fit(hetjax.augmented(given, noted), epochs=10, seed=3, data={"readers": 1})
    for index, row in enumerate(given):
        wanted = [by_hand(given, epoch, index, seed=3).tobytes() for epoch in range(10)]
        assert set(wanted) <= set(seen[index])
        assert len(set(wanted)) == 10
        np.testing.assert_array_equal(row["x"], before[index])


class ByHand:
    """A source of one's own that knows the epoch."""

    def __init__(self, epoch=0, seen=None):
        self.given, self.epoch, self.seen = rows(), epoch, set() if seen is None else seen

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.seen.add((self.epoch, index))
        return {"x": by_hand(self.given, self.epoch, index), "y": self.given[index]["y"]}

    def of_epoch(self, epoch):
        return ByHand(epoch, self.seen)


def test_a_run_is_one_over_views_made_by_hand():
    """Private data too, where each worker is in a pass of its own."""
    for local, sharing in (("stepped", "private"), ("fused", "shared"), ("virtual", "private")):
        fields = {"local": local, "data": {"sharing": sharing}}
        found, source = fit(hetjax.augmented(rows(), noisy), **fields).params, ByHand()
        np.testing.assert_array_equal(found, fit(source, **fields).params)
        assert {epoch for epoch, _ in source.seen} >= {0, 1, 2}


@pytest.mark.slow
def test_neither_a_second_run_nor_readers_nor_a_kill_change_a_bit(tmp_path, capsys):
    def run(**fields):
        return fit(hetjax.augmented(rows(), noisy), quota="equal", **fields)

    whole = run()
    assert "augment" not in capsys.readouterr().err  # repeatable: nothing to tell of
    for fields in ({}, {"data": {"readers": 5}}, {"data": {"readers": 1}}):
        np.testing.assert_array_equal(run(**fields).params, whole.params)
    arrays = hetjax.augmented(problems.classification(COUNT, np.float32), noisy)
    np.testing.assert_array_equal(fit(arrays, quota="equal").params, whole.params)

    def end(line):
        if line.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(workdir=tmp_path, callbacks=[end], raise_on_interrupt=True)
    capsys.readouterr()
    resumed = run(workdir=tmp_path, data={"readers": 3})
    assert "going on with the run" in capsys.readouterr().err
    assert resumed.summary["rounds"] == whole.summary["rounds"]
    np.testing.assert_array_equal(resumed.params, whole.params)
    other = run(seed=1)
    assert not np.array_equal(other.params, whole.params)


def test_what_fills_a_microbatch_up_is_the_view_of_the_epoch():
    given = rows()
    feeding = feed.StreamedFeed(hetjax.augmented(given, noisy), [jax.devices()[0]])
    ids = np.array([60, *passes.filling(np.array([7, 0]))], np.int32)
    for epoch in (2, 0):
        found = feeding.load(0, ids, epoch)
        wanted = [by_hand(given, epoch, index) for index in (60, 7, 0)]
        np.testing.assert_array_equal(found.examples["x"], wanted)
    feeding.close()


def test_numbers_from_elsewhere_and_a_resident_feed_are_told_of(capsys):
    own = np.random.default_rng(0)
    fit(hetjax.augmented(rows(), lambda example, rng: noisy(example, own)), epochs=1)
    assert "within one epoch, so that no run can be repeated" in capsys.readouterr().err
    fit(hetjax.augmented(rows(), noisy), epochs=1, data={"feed": "resident"})
    assert "changes by epoch, and data.feed='resident'" in capsys.readouterr().err
    fit(rows(), epochs=1, eval_source=hetjax.augmented(rows(), noisy))
    assert "every evaluation has the first" in capsys.readouterr().err


def test_many_examples_by_one_call_have_the_same_views():
    one, many = (
        hetjax.augmented(rows(), noisy),
        hetjax.augmented(test_sources.ManyItems(rows()), noisy),
    )
    ids = np.array([5, 2, 60])
    np.testing.assert_array_equal(sources.fetch(one, ids)["x"], sources.fetch(many, ids)["x"])
