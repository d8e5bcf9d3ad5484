"""What a feed brings, when it reads, and from which thread."""

import re
import threading
import time
import types

import jax
import numpy as np
import pytest

from hetjax.data import feed, readers, sources
from tests.data import examples

ROWS = np.array([[4, 2], [0, 7], [9, -1], [-1, -1]], np.int32)


@pytest.mark.parametrize("form", [feed.ResidentFeed, feed.StreamedFeed])
@pytest.mark.parametrize("shape", [(4, 2), (2, 2, 2)])
@pytest.mark.parametrize("first", [0, 30])
def test_microbatches_hold_their_examples_and_padding_repeats_the_first(form, shape, first):
    feeding = form(examples.Waiting(10, 0.0), [jax.devices()[1]])
    feeding.own = types.SimpleNamespace(first=first)  # other processes have the examples before
    ids = np.where(ROWS < 0, ROWS, ROWS + first).reshape(shape).astype(np.int32)
    microbatch = feeding.load(0, ids)
    np.testing.assert_array_equal(microbatch.example_ids, ids)
    mask = np.array([[1, 1], [1, 1], [1, 0], [0, 0]], np.float32)
    np.testing.assert_array_equal(microbatch.example_mask, mask.reshape(shape))
    expected = np.array([[4, 2], [0, 7], [9, 9], [0, 0]], np.float32)
    found = np.asarray(microbatch.examples["x"])
    np.testing.assert_array_equal(found, np.stack([expected.reshape(shape)] * 3, axis=-1))
    assert microbatch.examples["x"].devices() == {jax.devices()[1]}
    feeding.close()


def test_a_lent_microbatch_is_gathered_before_anything_is_computed_of_it():
    """In a loop of its own, whose result has the type of the data."""
    images = np.arange(8 * 32 * 32 * 3, dtype=np.uint8).reshape(8, 32, 32, 3)
    feeding = feed.ResidentFeed(sources.ArraySource({"x": images}), [jax.devices()[0]])
    kernel = np.ones((32, 16), np.float32)

    @jax.jit
    def program(microbatch):
        examples = feed.gathered(microbatch).examples
        rows = examples["x"].astype(np.float32).transpose(1, 3, 2, 0) / 255
        return jax.numpy.einsum("hcwb,wk->hckb", rows, kernel)

    ids = np.array([5, 2, 7, 0], np.int32)
    lent, loaded = feeding.lend(0, ids), feeding.load(0, ids)
    np.testing.assert_array_equal(program(lent), program(loaded))
    loops = program.lower(lent).compile().as_text().split("\n}\n")
    (own,) = [text for text in loops if re.search(r" = u8\[.* gather\(", text)]
    assert re.search(r"ROOT \S+ = u8\[4,32,32,3\]", own)
    assert "f32[" not in own


def test_a_resident_feed_does_not_lie_on_the_arrays_that_it_was_given():
    memory = np.zeros(64 * 4 + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4  # where a CPU device takes an array as it is
    given = memory[start : start + 64 * 4].reshape(64, 4)
    feeding = feed.ResidentFeed(sources.as_source(given), [jax.devices()[0]])
    given += 1
    assert not np.asarray(feeding.load(0, np.arange(8, dtype=np.int32)).examples).any()


def test_what_was_read_ahead_is_not_read_again():
    rows, source = ROWS[:3], examples.Waiting(10, 0.0)
    feeding = feed.StreamedFeed(source, [jax.devices()[0]])
    source.reads.clear()
    source.threads.clear()
    feeding.read_ahead(rows, np.zeros(len(rows), int))
    deadline = time.monotonic() + 120
    while len(source.reads) < rows.size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(source.reads) == rows.size  # before anybody asked for them
    for row in rows:
        feeding.load(0, row)
    feeding.load(0, ROWS[3])  # padding alone
    assert len(source.reads) == rows.size
    feeding.load(0, np.array([1, 3], np.int32))  # not announced
    assert len(source.threads - {threading.get_ident()}) == 1
    feeding.close()


def test_a_source_that_blocks_does_not_block_closing():
    blocked = threading.Event()

    source = examples.At5(lambda: blocked.wait(240))
    feeding = feed.StreamedFeed(source, [jax.devices()[0]])
    threading.Timer(0.2, feeding.close).start()
    began = time.perf_counter()
    with pytest.raises(BaseException, match="closed"):
        feeding.load(0, np.array([5, 6], np.int32))
    assert time.perf_counter() - began < 200  # it did not wait for the source
    blocked.set()


@pytest.mark.parametrize("num_readers", [1, 8])
def test_several_readers_bring_the_same_and_read_each_example_once(num_readers):
    source = examples.Waiting(96, 0.0005)
    feeding = feed.StreamedFeed(source, [jax.devices()[0]], crew=readers.Crew(num_readers))
    source.reads.clear()
    source.threads.clear()
    rows = np.random.default_rng(0).permutation(96).astype(np.int32).reshape(16, 6)
    for start in range(0, 16, 4):  # two rounds ahead
        ahead = rows[start : start + 8]
        feeding.read_ahead(ahead, np.zeros(len(ahead), int))
        for row in rows[start : start + 4]:
            loaded = feeding.load(0, row)
            np.testing.assert_array_equal(loaded.examples["y"], row)
            np.testing.assert_array_equal(loaded.examples["x"][:, 2], row)
    feeding.close()
    assert sorted(source.reads) == list(range(96))
    assert len(source.threads) == num_readers
    if num_readers == 1:
        assert source.reads == rows.reshape(-1).tolist()


def test_an_example_that_cannot_be_read_is_named_where_it_is_needed():
    def breaks():
        raise OSError("disk on fire")

    feeding = feed.StreamedFeed(examples.At5(breaks), [jax.devices()[0]], crew=readers.Crew(4))
    feeding.read_ahead(np.array([[1, 2], [5, 6]], np.int32), np.zeros(2, int))
    with pytest.raises(ValueError, match=r"example 5.*disk on fire"):
        feeding.load(0, np.array([5, 6], np.int32))
    feeding.close()
