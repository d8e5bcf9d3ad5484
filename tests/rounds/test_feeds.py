"""Whole runs on sources that change, wait, or were recorded with another feed."""

import json
import re

import numpy as np
import pytest

from hetjax.data import trial
from tests.data import examples
from tests.rounds import problems


class Noisy(examples.Augmented):
    """Examples of a problem, with fresh noise on each reading."""

    def __init__(self, scale=1.0, secs=0.0):
        super().__init__(64, secs)
        self.data, self.scale = problems.classification(64, np.float32), scale

    def __getitem__(self, index):
        noise = self.rng.normal(scale=self.scale, size=problems.FEATURES).astype(np.float32)
        self.reads.append(index)
        return {"x": self.data["x"][index] + noise, "y": self.data["y"][index]}


def fit(source, **fields):
    weights = problems.initial_weights(np.float32)
    return problems.fit(source, weights, **{"epochs": 3, "local": "virtual", **fields})


def test_every_epoch_reads_random_augmentation_anew(capsys):
    source = Noisy()
    fit(source)
    assert "So the feed is 'streamed'" in capsys.readouterr().err
    assert np.bincount(source.reads).min() >= 3
    fixed = Noisy()
    fit(fixed, data={"feed": "resident"})
    assert "all epochs have the same values" in capsys.readouterr().err
    assert np.bincount(fixed.reads).min() == 1


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_readers_change_nothing_that_is_computed(local):
    data = problems.classification(203, np.float32)
    rows = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    cluster = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}
    found = [
        fit(source, local=local, cluster=cluster, data=fields).params
        for source, fields in (
            (data, {"feed": "resident"}),
            (rows, {}),
            (rows, {"readers": 5}),
            (rows, {"feed": "streamed", "readers": 1}),
            (rows, {"feed": "streamed", "readers": 5}),
        )
    ]
    for params in found[1:]:
        np.testing.assert_array_equal(params, found[0])


def test_an_epoch_reads_each_example_of_a_slow_source_once_by_several_threads(monkeypatch):
    monkeypatch.setattr(trial, "_GAIN", 0.0)  # however busy the machine is

    class Slow(examples.Waiting):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return {"x": np.ones(problems.FEATURES, np.float32), "y": item["y"] % 3}

    def reads(epochs, **data):
        source = Slow(64, 0.001)
        result = fit(source, epochs=epochs, data={"feed": "streamed", **data})
        assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
        return np.bincount(source.reads, minlength=64), len(source.threads)

    (once, _), (three_times, threads) = reads(1), reads(3)
    np.testing.assert_array_equal(three_times - once, np.full(64, 2))
    assert threads > 4
    assert reads(3, readers=1)[1] <= 2  # the main thread, and the feed's


def test_a_run_that_was_recorded_with_another_feed_goes_on(tmp_path):
    """One of an earlier version too, which had no such fields and another default."""
    data = problems.classification(64, np.float32)
    common = {"quota": "equal", "budget": 4}
    whole = fit(data, epochs=4, **common)

    def end(line):
        return line.round >= 5

    fit(data, epochs=4, workdir=tmp_path, callbacks=[end], data={"feed": "resident"}, **common)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert written["data"].pop("feed") == "resident"
    written["data"]["feed"] = "resident"
    del written["data"]["readers"], written["examples_apart"]
    path.write_text(json.dumps(written))
    result = fit(
        data, epochs=4, workdir=tmp_path, data={"readers": 3}, examples_apart="skip", **common
    )
    assert result.summary["rounds"] == whole.summary["rounds"]
    np.testing.assert_array_equal(result.params, whole.params)
    with pytest.raises(ValueError, match=r"another configuration \(data\.sharing"):
        fit(data, epochs=4, workdir=tmp_path, data={"sharing": "private"}, **common)


def test_fit_shows_its_bar_while_it_reads(capsys):
    class Slow(Noisy):
        thread_safe = False

        def __getitem__(self, index):
            examples.time.sleep(0.02)
            return super().__getitem__(index)

    fit(Slow(scale=0.0), epochs=1, progress=True)  # 1.3 s
    assert re.search(r"reading the source:.*/64", capsys.readouterr().err)
    fit(Slow(scale=0.0), epochs=1, progress=False)
    assert capsys.readouterr().err == ""


def test_the_examples_of_an_evaluation_that_change_are_told(capsys):
    fit(problems.classification(64, np.float32), epochs=1, eval_source=Noisy())
    assert "eval_source: example" in capsys.readouterr().err
