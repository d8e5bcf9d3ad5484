"""Processes that read: the same examples as threads give, and sentences where they cannot."""

import multiprocessing
import operator
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import hetjax
from hetjax.data import feed, reader_processes, readers, sources
from hetjax.liveness import interrupts
from tests.data import examples, test_trial
from tests.rounds import problems

CREW = readers.asked("processes:2")


def shifted(example, rng):
    return {"x": example["x"] + rng.normal(size=3).astype(np.float32)}


def test_processes_read_what_threads_read():
    """By other processes, each example once; as a whole, and ahead, in any epoch."""
    source = examples.Busy()
    loaded = sources.load_all(source, crew=CREW)
    by = set(loaded.arrays["by"].tolist())
    assert len(by) == 2
    assert os.getpid() not in by
    assert source.reads == [0]  # the shapes
    np.testing.assert_array_equal(loaded.arrays["x"], sources.load_all(source).arrays["x"])

    source, devices = hetjax.augmented(examples.Busy(), shifted), [jax.devices()[0]]
    alone, together = (feed.StreamedFeed(source, devices, crew=c) for c in (readers.ALONE, CREW))
    rows, epochs = np.array([[4, 2], [63, 7], [9, -1]], np.int32), np.array([0, 2, 5])
    together.read_ahead(rows, epochs)
    for row, epoch in zip(rows, epochs, strict=True):
        one, other = (each.load(0, row, epoch).examples["x"] for each in (alone, together))
        np.testing.assert_array_equal(one, other)
    together.close()
    alone.close()


def test_a_process_that_dies_or_fails_ends_no_run_in_silence():
    devices = [jax.devices()[0]]
    dying = feed.StreamedFeed(examples.Busy(ends_at=5), devices, crew=CREW)
    dying.load(0, np.array([4, 6], np.int32))
    with pytest.raises(ValueError, match=r"process ended \(by SIGKILL\) while it read examples 5"):
        dying.load(0, np.array([4, 5], np.int32))
    dying.close()

    class Local(examples.Busy):
        pass

    with pytest.raises(ValueError, match="the source cannot be sent to a process"):
        feed.StreamedFeed(Local(), devices, crew=CREW)
    with pytest.raises(ValueError, match=r"cannot make the source.*OSError: no such file here"):
        feed.StreamedFeed(examples.Busy(opens=False), devices, crew=CREW)


def test_an_example_that_cannot_be_read_is_named():
    few = [{"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": np.zeros(3)}, {"x": np.zeros(2)}]
    with pytest.raises(ValueError, match="example 2 differs from the first of the list"):
        sources.load_all(few, crew=CREW)


def test_a_run_reads_by_processes_to_the_bit(capsys):
    data = problems.classification(30, np.float32)
    rows = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    weights = problems.initial_weights(np.float32)
    fields, how = {"epochs": 2, "local": "virtual"}, {"feed": "streamed", "readers": "processes:2"}
    found = problems.fit(rows, weights, data=how, **fields)
    np.testing.assert_array_equal(found.params, problems.fit(data, weights, **fields).params)
    assert found.config["data"]["readers"] == "processes:2"
    with pytest.raises(ValueError, match=r"data\.readers: got 'processes:0'"):
        problems.fit(rows, weights, data={"readers": "processes:0"})
    assert capsys.readouterr().err == ""


def test_signals_end_a_run_and_not_its_readers():
    """As a terminal or a scheduler sends them to all processes at once."""
    before = set(multiprocessing.active_children())
    reading = reader_processes.Processes(operator.add, 1)
    (child,) = set(multiprocessing.active_children()) - before
    for number in interrupts.ENDS:
        os.kill(child.pid, number)
    assert reading(3, 4) == 7
    reading.close()
    assert child.exitcode == -signal.SIGKILL


def test_copies_of_a_generator_are_told_of(capsys):
    test_trial.made_for(examples.Augmented(), num_readers="processes:2")
    assert "draw the same random numbers; hetjax.augmented" in capsys.readouterr().err


def test_a_program_without_a_guard_is_told_of_it(tmp_path):
    path = tmp_path / "unguarded.py"
    program = "sources.load_all([1.0, 2.0], crew=readers.asked('processes:1'))\n"
    path.write_text(f"from hetjax.data import readers, sources\n{program}")
    found = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert re.search(r"if __name__ == '__main__'.*ended as it began \(exit code 1\)", found.stderr)
