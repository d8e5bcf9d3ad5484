"""What people give in place of a source works, or they are told what to give instead."""

import itertools
import re
import types

import numpy as np
import optax
import pytest

import hetjax
from hetjax.data import sources


class Column:
    """A column of a table, as pandas and Polars have it."""

    def __init__(self, values):
        self.values = np.array(values)

    def to_numpy(self):
        return self.values

    def __len__(self):
        return len(self.values)


class Table:
    """A DataFrame: its index is of columns, its length of rows."""

    def __init__(self, **columns):
        self.columns, self._columns = list(columns), columns

    def __getitem__(self, name):
        return Column(self._columns[name])

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def to_numpy(self):
        return np.stack([np.array(column) for column in self._columns.values()], axis=1)


class Series(Column):
    """Of pandas: what stands in brackets is a label, not a position."""

    iloc = ()

    def __getitem__(self, label):
        raise KeyError(label)


class Dataset:
    """A Hugging Face data set of lists, and what `load_dataset` returns without a split."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __getitems__(self, ids):
        return [self.rows[index] for index in ids]

    def with_format(self, kind):
        return self


class Loader:
    """A DataLoader of PyTorch."""

    dataset, batch_size = [1, 2], 2

    def __iter__(self):
        return iter([[1, 2]])

    def __len__(self):
        return 1


class Endless:
    def __getitem__(self, index):
        return {"x": np.float32(index)}


class EndlessWithALength(Endless):
    def __len__(self):
        return 6


class Repeated(EndlessWithALength):
    def __len__(self):
        return 2**62


class Streamed(Endless):
    """Of Hugging Face, which has an index that nobody may use."""

    def __iter__(self):
        return iter([])


class Uncounted(EndlessWithALength):
    def __len__(self):
        raise TypeError("the number of examples is not known")


def test_a_dict_of_lists_is_a_source():
    source = sources.as_source({"x": [[1, 2], [3, 4]], "y": [0, 1], "w": [0.5, 1]})
    assert len(source) == 2
    assert {k: v.dtype.name for k, v in source.arrays.items()} == {
        "x": "int32",
        "y": "int32",
        "w": "float32",
    }
    np.testing.assert_array_equal(source[1]["x"], [3, 4])
    pair = sources.as_source(([[[1.0], [2.0]], [[3.0], [4.0]]], [True, False]))
    assert [leaf.shape for leaf in pair.arrays] == [(2, 2, 1), (2,)]


def test_lists_within_the_items_of_a_source_are_arrays():
    """As a Hugging Face data set gives them, without a format."""
    data = Dataset([{"image": [[1, 2], [3, 4]], "label": i} for i in range(3)])
    fetched = sources.fetch(sources.as_source(data), np.array([2, 0]))
    assert fetched["image"].shape == (2, 2, 2)
    assert fetched["label"].tolist() == [2, 0]


def test_the_columns_of_a_table_are_arrays():
    source = sources.as_source(Table(x=[1.5, 2.5, 3.5], y=[0, 1, 0]))
    assert len(source) == 3
    assert source[2] == {"x": 3.5, "y": 0}
    assert sources.as_source(Series([4, 5, 6]))[2] == 6


def test_a_source_whose_items_never_end_needs_a_length():
    source = sources.as_source(EndlessWithALength())
    assert sources.fetch(source, np.array([5, 0]))["x"].tolist() == [5, 0]


TEXT = r"tokenise the text first.*token ids"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": ["a", "b"]}, rf"\['text'\] is a list of strings.*{TEXT}"),
        ({"text": np.array(["a", "b"])}, rf"\['text'\] has dtype <U1.*{TEXT}.*np\.unique"),
        ({"y": [0, 1, None, 1]}, r"\['y'\] cannot be used: entry 2 is None, which is no number"),
        ({"y": [0, "x", 1]}, r"\['y'\] cannot be used: entry 1 is 'x', which is no number"),
        ({"y": np.array([0, 1, "x"], object)}, r"\['y'\] has dtype object, and entry 2 is 'x'"),
        ({"text": np.array(["a", "b"], object)}, rf"\['text'\] has dtype object.*{TEXT}"),
        (Table(text=["a", "b"]), rf"\['text'\] has dtype <U1.*{TEXT}"),
        (
            {"x": [[1, 2], [3]]},
            r"\['x'\] has rows of different lengths: row 0 has 2 entries, row 1 has 1.*pad",
        ),
        ({"x": [[[1], [2]], [[1, 2], [3]]]}, r"\['x'\]\[1\] has rows of different lengths.*pad"),
        ({"x": np.array([[1, 2], [3]], object)}, r"'x'.*dtype object.*different lengths.*pad"),
        (Table(x=[Column(["a"]), Column(["b"])]), r"\['x'\] has dtype object.*entries.*np\.stack"),
        ({"x": [np.zeros(3), np.zeros(3)], "y": [0, 1]}, r"equal lengths.*np\.stack"),
        ({"train": Dataset([1]), "test": Dataset([2])}, r"dict of data sets.*source=data\['train"),
        (Dataset, r"the class Dataset; give an instance of it, Dataset\(…\)"),
        (Loader(), r"Loader.*loader\.dataset.*microbatch_size=.*ordering=.*'readers'"),
        (Endless(), "Endless: it has no __len__.*how many an epoch"),
        (Repeated(), r"Repeated: it has 4,611,686,018,427,387,904 examples or no end.*epochs="),
        (Uncounted(), r"Uncounted: len\(\) of it raises TypeError: the number of.*NumPy array"),
        ((i for i in range(3)), r"generator.*through once.*list\(…\).*__getitem__"),
        (itertools.count(), r"count: what can be gone through once.*islice"),
        (types.SimpleNamespace(__iter__=0), r"SimpleNamespace: it is made to be gone.*tfds"),
        (Streamed(), r"Streamed: it is made to be gone through.*without streaming"),
        (object(), r"object: it has no __getitem__ and no examples"),
        (None, r"NoneType: it has no __getitem__"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_a_source_is_refused_with_what_to_give(data, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        sources.as_source(data)


@pytest.mark.parametrize("make", [list, Dataset])
def test_text_in_items_is_refused_before_anything_is_compiled(make):
    def never(params, batch, rng):
        raise AssertionError("traced")

    items = make([{"text": "a long text that nobody wants to read", "label": 0}] * 4)
    with pytest.raises(
        ValueError, match=r"example 0.*\['text'\] is str \('a long text that nob"
    ) as e:
        hetjax.Run(never, np.zeros(2, np.float32), None, items, workers=1, microbatch_size=2)
    assert re.search(TEXT, str(e.value))


def test_a_wrong_eval_source_is_refused_before_anything_is_compiled():
    def never(params, batch, rng):
        raise AssertionError("traced")

    with pytest.raises(ValueError, match=r"example 0.*is str.*tokenise"):
        hetjax.fit(
            never,
            np.zeros(2, np.float32),
            optax.sgd(0.1),
            np.zeros((8, 2), np.float32),
            eval_source=["a", "b"],
            workers=1,
        )
