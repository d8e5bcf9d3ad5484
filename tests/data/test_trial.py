"""What a few readings before the run find out, and what its user is told."""

import random
import re

import jax
import numpy as np
import pytest

from hetjax.data import choosing, feed, held, sources, trial
from tests.data import examples


def made_for(source, **options):
    """The feed that a run takes."""
    options = {"asked": "auto", "num_readers": 1, "leads": True, **options}
    options.setdefault("agree", lambda problem, solve: solve())
    made = choosing.training_feed(source, [jax.devices()[0]], **options)
    made.close()
    return made


def choose(source, capsys, **options):
    """What kind of feed a run takes, and what was said on stderr."""
    made = made_for(source, **options)
    return type(made), capsys.readouterr().err


def test_a_source_that_gives_the_same_again_is_resident_without_a_word(capsys):
    assert choose(examples.Waiting(secs=0), capsys) == (feed.ResidentFeed, "")
    arrays = sources.as_source({"x": np.random.default_rng(0).normal(size=(9, 2))})
    assert choose(arrays, capsys) == (feed.ResidentFeed, "")
    nan = [{"x": np.float32(np.nan)}] * 5
    assert choose(nan, capsys) == (feed.ResidentFeed, "")


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, feed.StreamedFeed, r"of Augmented was another .* read again \(\['noise'\] differed\)"),
        ({"leads": False}, feed.StreamedFeed, ""),
        ({"asked": "resident"}, feed.ResidentFeed, r"\(\['noise'\] differed\)"),
        ({"asked": "streamed", "num_readers": 3}, feed.StreamedFeed, ""),
        ({"num_readers": 4}, feed.StreamedFeed, "4 threads read Augmented"),
    ],
    ids=str,
)
def test_what_is_made_and_said_of_a_source_that_changes(options, kind, words, capsys):
    """Resident is taken at its word; streamed reads nothing beforehand but the shapes."""
    source = examples.Augmented()
    found, said = choose(source, capsys, **options)
    assert found is kind
    assert bool(said) == bool(words)
    assert re.search(words, said)
    assert options or said.count("\n") == 1
    assert (source.reads == [0]) == (options.get("asked") == "streamed")


@pytest.mark.parametrize("asked", ["auto", "streamed"])
def test_what_changes_after_it_was_read_once_is_told(asked, capsys):
    given = {"x": np.arange(12.0, dtype=np.float32)}
    made = made_for(sources.as_source(given), asked=asked)
    given["x"][:] = 0
    made.compare(1)
    said = capsys.readouterr().err
    assert ("example 3 is another one than before" in said) == (asked == "auto"), said


def test_an_evaluation_on_changing_examples_is_told(capsys):
    choosing.evaluation_feed(examples.Augmented(), jax.devices()[0])
    assert "eval_source: example" in capsys.readouterr().err
    choosing.evaluation_feed(examples.Waiting(secs=0), jax.devices()[0])
    assert capsys.readouterr().err == ""


def test_a_rare_change_is_found():
    """Of 48 examples that are read twice, 1 in 1e4 sources escape."""

    class Flipped(examples.Augmented):
        def __getitem__(self, index):
            return np.float32(index) * (1 if self.rng.random() < 0.1 else -1) + np.float32(1)

    assert all(trial.look(Flipped(1000, seed=seed)).difference for seed in range(20))


def test_a_source_is_read_once_and_a_few_examples_twice_more():
    source = examples.Waiting(512, secs=0)
    made_for(source)
    shapes, held = 2, 4
    assert 512 < len(source.reads) <= 512 + 2 * 48 + shapes + held


def test_the_global_generators_are_as_before():
    class Drawing(examples.Waiting):
        def __getitem__(self, index):
            return np.float32(np.random.random() + random.random())  # noqa: NPY002

    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    expected = Drawing()[0]
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    assert trial.look(Drawing()).difference is not None
    assert Drawing()[0] == expected


def test_several_threads_do_not_read_what_says_that_one_has_to():
    source = examples.OfOneThread(64, 0.0)
    source.thread_safe = False
    assert made_for(source)
    with pytest.raises(ValueError, match=r"data\.readers: got 4.*thread_safe = False"):
        made_for(source, num_readers=4)


def test_the_bar_of_a_resident_set_comes_after_a_second_and_goes(capsys):
    def read(progress, secs):
        source = examples.Waiting(320, secs)
        made = choosing.evaluation_feed(source, jax.devices()[0], progress=progress)
        made.close()
        return capsys.readouterr().err

    said = read(True, 0.005)  # 1.6 s
    assert "reading the eval_source" in said
    assert "/320" in said
    assert said.split("\r")[-1].strip() == ""
    assert read(False, 0.005) == ""
    assert read(True, 0.0) == ""


@pytest.mark.parametrize(
    ("source", "numbers", "kind"),
    [
        (examples.Waiting(secs=0), [1.0], feed.StreamedFeed),
        (examples.Augmented(), [0.0], feed.ResidentFeed),
    ],
    ids=["changes", "changes not"],
)
def test_all_processes_take_the_feed_that_one_of_them_has_chosen(source, numbers, kind):
    """Whatever they see themselves: `agree` brings what process 0 has found."""
    made = made_for(source, leads=False, agree=lambda problem, solve: numbers)
    assert type(made) is kind


def test_a_source_that_is_closed_meanwhile_stops_nobody(capsys):
    class File(examples.Waiting):
        def __len__(self):
            if self.count == 0:
                raise OSError("closed")
            return self.count

    source = File(secs=0)
    kept = held.Held(source, name="the source", values=True, way="")
    source.count = 0
    kept.compare()
    assert capsys.readouterr().err == ""


def test_a_change_is_told_where_two_passes_differ_and_once(capsys):
    given = {"x": np.arange(12.0), "y": np.full(12, np.nan)}
    kept = held.Held(sources.as_source(given), name="the source", values=True, way="Stay.")
    kept.compare()
    assert capsys.readouterr().err == ""  # a NaN is itself
    given["x"][11] = 5
    kept.compare()
    assert "example 11 is another one than before (['x'])" in capsys.readouterr().err
    kept.compare()
    assert capsys.readouterr().err == ""
