import collections
import types

import ml_dtypes
import numpy as np
import pytest

from hetjax.data import readers, sources


class Items:
    """A source of given items; an item that is an exception is raised."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


class ManyItems(Items):
    """As tfds.data_source: `__getitems__` takes a list, and fails as a whole."""

    def __getitems__(self, ids):
        assert type(ids) is list
        assert all(type(index) is int for index in ids)
        return [self[index] for index in ids]


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"image": rng.integers(0, 256, (4, 3), dtype=np.uint8), "label": int(label)}
        for label in rng.integers(0, 10, count)
    ]


def test_array_source_returns_the_examples_of_its_arrays():
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    source = sources.as_source({"x": x, "pair": (y, y + 1)})
    assert len(source) == 6
    np.testing.assert_array_equal(source[4]["x"], x[4])
    assert source[4]["pair"] == (4, 5)
    assert source[-1]["pair"] == (5, 6)
    assert [int(item["pair"][0]) for item in source] == list(range(6))


@pytest.mark.parametrize("make", [Items, ManyItems, list], ids=["getitem", "getitems", "list"])
@pytest.mark.parametrize("num_ids", [0, 1, 17])
def test_fetch_equals_taking_rows_of_the_stacked_arrays(make, num_ids):
    items, stacked = images(40), {}
    for name, dtype in (("image", np.uint8), ("label", np.int32)):
        stacked[name] = np.array([item[name] for item in items], dtype)
    ids = np.random.default_rng(num_ids).integers(0, 40, num_ids)
    got = sources.fetch(make(items), ids)
    fast = sources.fetch(sources.ArraySource(stacked), ids)
    for name, array in stacked.items():
        assert got[name].dtype == fast[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array[ids])
        np.testing.assert_array_equal(fast[name], array[ids])


def test_load_all_equals_the_stacked_items_over_several_chunks(monkeypatch):
    monkeypatch.setattr(sources, "LOAD_CHUNK", 7)
    items = images(40)
    for make in (Items, ManyItems):
        told = []
        loaded = sources.load_all(make(items), on_read=told.append)
        assert told == [7, 7, 7, 7, 7, 5]
        assert isinstance(loaded, sources.ArraySource)
        for name in ("image", "label"):
            np.testing.assert_array_equal(loaded.arrays[name], [item[name] for item in items])


def test_load_all_by_several_threads_equals_that_by_one_and_tells_how_far_it_is():
    items = images(100)
    for make in (list, Items, ManyItems):
        told = []
        loaded = sources.load_all(make(items), crew=readers.Crew(5), on_read=told.append)
        alone = sources.load_all(make(items), on_read=told.append)
        assert sum(told) == 200
        for name in ("image", "label"):
            np.testing.assert_array_equal(loaded.arrays[name], alone.arrays[name])
    items[17], items[55] = OSError("first"), OSError("second")
    for _ in range(10):
        with pytest.raises(ValueError, match=r"example 17.*first"):
            sources.load_all(Items(items), crew=readers.Crew(5))


def test_nested_items_keep_their_structure():
    point = collections.namedtuple("Point", "u v")
    item = {"b": (np.float32(1), [np.zeros(2, np.int8), True]), "a": point(np.ones(1), 2.5)}
    got = sources.fetch([item, item], np.array([1, 0]))
    expected = {
        "b": (np.ones(2, np.float32), [np.zeros((2, 2), np.int8), np.array([True, True])]),
        "a": point(np.ones((2, 1)), np.full(2, 2.5, np.float32)),
    }
    assert repr(got) == repr(expected)  # structure, dtypes and values


def test_bfloat16_is_a_number():
    source = sources.ArraySource({"x": np.ones((2, 3), ml_dtypes.bfloat16)})
    assert sources.fetch(source, np.array([1]))["x"].dtype == ml_dtypes.bfloat16


def test_fetch_does_not_return_views_of_the_source():
    x = np.zeros((4, 2))
    sources.fetch(sources.ArraySource(x), np.arange(4))[:] = 1
    assert not x.any()


@pytest.mark.parametrize("make", [Items, ManyItems])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (RuntimeError("hash mismatch"), r"example 5 .*cannot be read: RuntimeError: hash mism"),
        ({"image": np.zeros((4, 2), np.uint8), "label": 0}, r"example 5 differs.*\[4, 2\]"),
        ({"image": np.zeros((4, 3), np.int64), "label": 0}, r"example 5 differs.*int64"),
        ({"image": np.zeros((4, 3), np.uint8)}, r"example 5 differs from the first"),
        ({"image": np.zeros((4, 3), np.uint8), "label": None}, r"example 5 .*dtype object"),
        ({"image": np.zeros((4, 3), np.uint8), "label": 2**40}, r"example 5 .*'label'"),
    ],
    ids=["unreadable", "shape", "dtype", "missing", "none", "too-large"],
)
def test_a_corrupt_record_is_named(make, bad, message):
    items = images(9)
    items[5] = bad
    with pytest.raises(ValueError, match=message):
        sources.load_all(make(items))
    with pytest.raises(ValueError, match=message):
        sources.fetch(make(items), np.array([1, 8, 5, 2]))
    good = sources.fetch(make(items), np.array([1, 8, 2]))
    assert good["label"].tolist() == [items[index]["label"] for index in (1, 8, 2)]


def test_getitems_of_the_wrong_length_is_refused():
    class Short(Items):
        def __getitems__(self, ids):
            return [self[index] for index in ids[1:]]

    with pytest.raises(ValueError, match="must return a list of 3 items"):
        sources.fetch(Short(images(4)), np.array([0, 1, 2]))


@pytest.mark.parametrize("ids", [[-1, 0], [0, 4]])
def test_ids_outside_the_source_are_refused(ids):
    for source in (sources.ArraySource(np.arange(4)), list(range(4))):
        with pytest.raises(ValueError, match="outside the source of 4"):
            sources.fetch(source, np.array(ids))


def test_a_prepared_set_that_cannot_be_read_is_named_with_its_folder():
    class Damaged:
        dataset_info = types.SimpleNamespace(data_dir="prepared/here")

        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise RuntimeError("corrupted chunk")

    with pytest.raises(ValueError, match=r"example 1 of Damaged in prepared/here \(if its"):
        sources.read(Damaged(), 1)
