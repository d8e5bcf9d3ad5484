"""Whole runs on sources that change, wait, or were recorded with another feed."""

import json
import re

import numpy as np
import optax
import pytest

import hetjax
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


def test_an_epoch_reads_each_example_of_a_slow_source_once_by_several_threads():

    class Slow(examples.Waiting):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return {"x": np.ones(problems.FEATURES, np.float32), "y": item["y"] % 3}

    def reads(epochs, **data):
        source = Slow(64, 0.001)
        result = fit(source, epochs=epochs, data={"feed": "streamed", **data})
        assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
        return np.bincount(source.reads, minlength=64), len(source.threads)

    (once, _), (three_times, threads) = reads(1, readers=8), reads(3, readers=8)
    np.testing.assert_array_equal(three_times - once, np.full(64, 2))
    assert threads > 4
    assert reads(3)[1] <= 2  # the main thread, and the feed's


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
    del written["data"]["readers"], written["loss_over"]
    path.write_text(json.dumps(written))
    result = fit(
        data, epochs=4, workdir=tmp_path, data={"readers": 3}, loss_over="microbatch", **common
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


@pytest.mark.parametrize("feed", ["auto", "streamed"])
def test_noise_from_the_index_is_one_view(feed, capsys):
    views = {}

    class OfIndex(Noisy):
        def __getitem__(self, index):
            self.rng = np.random.default_rng(index)
            example = super().__getitem__(index)
            views.setdefault(index, set()).add(example["x"].tobytes())
            return example

    fit(OfIndex(), data={"feed": feed})
    assert {len(of_example) for of_example in views.values()} == {1}
    assert capsys.readouterr().err == ""


def test_one_reader_draws_the_same_views_in_each_run():
    fields = {"data": {"feed": "streamed", "readers": 1}, "quota": "equal"}
    first = fit(Noisy(), **fields)
    np.testing.assert_array_equal(first.params, fit(Noisy(), **fields).params)


class Curriculum(examples.Waiting):
    """Easier at first: what it gives depends on an epoch that is set."""

    def __init__(self):
        super().__init__(64, 0.0)
        self.data, self.epoch = problems.classification(64, np.float32), 0

    def set_epoch(self, line):
        self.epoch = line.epoch + 1

    def __getitem__(self, index):
        x, y = self.data["x"][index], self.data["y"][index]
        return {"x": x * np.float32(1 + self.epoch), "y": y}


@pytest.mark.parametrize("epochs", [1, 4])
def test_a_source_that_a_callback_changes_is_told_of_once(epochs, capsys):
    source = Curriculum()
    found = fit(source, epochs=epochs, callbacks=[source.set_epoch])
    (line,) = capsys.readouterr().err.splitlines()
    assert "the source (Curriculum) changes while it is used: example 0 is another one" in line
    assert "(['x']). Its values were read once and stay. data.feed='streamed' reads" in line
    np.testing.assert_array_equal(found.params, fit(Curriculum(), epochs=epochs).params)
    streamed = Curriculum()
    fit(streamed, epochs=4, callbacks=[streamed.set_epoch], data={"feed": "streamed"})
    assert capsys.readouterr().err == ""


def test_arrays_that_are_written_into_are_told_of(capsys):
    data = problems.classification(64, np.float32)

    def add_noise(line):
        data["x"] += np.float32(1)

    fit(data, epochs=3, callbacks=[add_noise])
    assert "the source (ArraySource) changes while it is used" in capsys.readouterr().err


@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_a_buffer_that_grows_is_told_of_once(feed, capsys):
    source = Curriculum()

    def grow(line):
        source.count += 8

    result = fit(source, epochs=4, callbacks=[grow], data={"feed": feed})
    (line,) = capsys.readouterr().err.splitlines()
    assert "the source (Curriculum) has " in line
    assert "examples now, and had 64 when it was taken: the number stays 64" in line
    assert result.summary["examples_processed"] == 4 * 64


def test_a_run_that_steps_and_an_evaluation_tell_of_changes_too(capsys):
    source, evaluated = Curriculum(), Curriculum()
    fields = {"epochs": 3, "microbatch_size": 4, "budget": 8, "workers": 2, "local": "virtual"}
    weights = problems.initial_weights(np.float32)
    with hetjax.Run(problems.softmax_loss, weights, optax.sgd(0.1), source, **fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
            source.set_epoch(report)
    assert capsys.readouterr().err.count("the source (Curriculum) changes while") == 1
    fit(Curriculum(), epochs=3, eval_source=evaluated, callbacks=[evaluated.set_epoch])
    (line,) = capsys.readouterr().err.splitlines()
    assert "the eval_source (Curriculum) changes while it is used" in line
    assert "All evaluations have them, so that they can be compared" in line
