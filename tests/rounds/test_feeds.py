"""Whole runs on sources that change, wait, or were recorded with another feed."""

import numpy as np
import pytest

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
    assert "keeps the first values" in capsys.readouterr().err
    assert np.bincount(fixed.reads).min() == 1


@pytest.mark.parametrize(
    ("local", "sharing"), [("stepped", "private"), ("fused", "shared"), ("virtual", "private")]
)
def test_feeds_and_readers_change_nothing_that_is_computed(local, sharing):
    data = problems.classification(203, np.float32)
    rows = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    cluster = {"num_workers": 4, "secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"}
    found = [
        fit(source, local=local, cluster=cluster, data={"sharing": sharing, **fields}).params
        for source, fields in (
            (data, {"feed": "resident"}),
            (data, {"feed": "streamed"}),
            (rows, {"feed": "streamed", "readers": 1}),
            (rows, {"feed": "streamed", "readers": 5}),
        )
    ]
    for params in found[1:]:
        np.testing.assert_array_equal(params, found[0])


def test_a_run_that_was_recorded_with_another_feed_goes_on(tmp_path):
    data = problems.classification(64, np.float32)
    common = {"epochs": 4, "quota": "equal", "budget": 4}
    whole = fit(data, **common)

    def end(line):
        return line.round >= 5

    fit(data, workdir=tmp_path, callbacks=[end], data={"feed": "resident"}, **common)
    result = fit(data, workdir=tmp_path, data={"readers": 3}, loss_over="microbatch", **common)
    assert result.summary["rounds"] == whole.summary["rounds"]
    np.testing.assert_array_equal(result.params, whole.params)
    with pytest.raises(ValueError, match=r"another configuration \(data\.sharing"):
        fit(data, workdir=tmp_path, data={"sharing": "private"}, **common)


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


def test_a_source_that_a_callback_changes_is_told_of_once(capsys):
    source, epochs = Curriculum(), 4
    found = fit(source, epochs=epochs, callbacks=[source.set_epoch])
    (line,) = capsys.readouterr().err.splitlines()
    assert "the source (Curriculum) changes while it is used: example 0 is another one" in line
    np.testing.assert_array_equal(found.params, fit(Curriculum(), epochs=epochs).params)
    streamed = Curriculum()
    fit(streamed, epochs=4, callbacks=[streamed.set_epoch], data={"feed": "streamed"})
    assert capsys.readouterr().err == ""


def test_a_buffer_that_grows_is_told_of_once(capsys):
    source = Curriculum()

    def grow(line):
        source.count += 8

    result = fit(source, epochs=4, callbacks=[grow], data={"feed": "streamed"})
    (line,) = capsys.readouterr().err.splitlines()
    assert "the source (Curriculum) has " in line
    assert "examples now; this run stays with the 64" in line
    assert result.summary["examples_processed"] == 4 * 64


def test_an_evaluation_tells_of_changes_too(capsys):
    evaluated = Curriculum()
    fit(Curriculum(), epochs=3, eval_source=evaluated, callbacks=[evaluated.set_epoch])
    (line,) = capsys.readouterr().err.splitlines()
    assert "the eval_source (Curriculum) changes while it is used" in line
