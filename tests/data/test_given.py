"""What people give in place of a source works, or they are told what to give instead."""

import re

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.data import sources
from tests.data import iterables_examples
from tests.data.test_sources import ManyItems


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


class ArrowTable:
    """As of pyarrow: its index is of columns, by name or by place; so is that of its batches."""

    def __init__(self, **columns):
        self.column_names, self._columns = list(columns), columns

    def __getitem__(self, name):
        return np.array(self._columns[name] if name in self._columns else self._columns.values())

    column = __getitem__

    def __len__(self):
        return len(next(iter(self._columns.values())))


class Series(Column):
    """Of pandas: what stands in brackets is a label, not a position."""

    iloc = ()

    def __getitem__(self, label):
        raise KeyError(label)


class Endless:
    def __getitem__(self, index):
        return {"x": np.float32(index)}


class Repeated(Endless):
    def __len__(self):
        return 2**62


class Uncounted(Endless):
    def __len__(self):
        raise TypeError("the number of examples is not known")


def test_a_dict_of_lists_is_a_source():
    source = sources.as_source({"x": [[1, 2], [3, 4]], "y": [0, 1], "w": [0.5, 1]})
    assert len(source) == 2
    types = {"x": "int32", "y": "int32", "w": "float32"}
    assert {name: array.dtype.name for name, array in source.arrays.items()} == types
    np.testing.assert_array_equal(source[1]["x"], [3, 4])
    pair = sources.as_source(([[[1.0], [2.0]], [[3.0], [4.0]]], [True, False]))
    assert [leaf.shape for leaf in pair.arrays] == [(2, 2, 1), (2,)]


def test_lists_within_the_items_of_a_source_are_arrays():
    """As a Hugging Face data set gives them, without a format."""
    data = ManyItems([{"image": [[1, 2], [3, 4]], "label": i} for i in range(3)])
    fetched = sources.fetch(sources.as_source(data), np.array([2, 0]))
    assert fetched["image"].shape == (2, 2, 2)
    assert fetched["label"].tolist() == [2, 0]


def test_the_columns_of_a_table_are_arrays():
    source = sources.as_source(Table(x=[1.5, 2.5, 3.5], y=[0, 1, 0]))
    assert len(source) == 3
    assert source[2] == {"x": 3.5, "y": 0}
    assert sources.as_source(Series([4, 5, 6]))[2] == 6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": ["a", "b"]}, r"\['text'\] is a list of strings.*numbers"),
        ({"text": np.array(["a", "b"])}, r"\['text'\] has dtype <U1.*numbers"),
        ({"y": [0, 1, None, 1]}, r"\['y'\] cannot be used: entry 2 is None"),
        ((np.zeros(2), [1, None]), r"\[1\] cannot be used: entry 1 is None"),
        ({"y": np.array([0, 1, "x"], object)}, r"\['y'\] has dtype object, and entry 2 is 'x'"),
        ({"x": [[[1], [2]], [[1, 2], [3]]]}, r"\['x'\]\[1\] has rows of different lengths"),
        (Table(x=[Column(["a"]), Column(["b"])]), r"\['x'\] has dtype object.*np\.stack"),
        ({"x": np.float32(1)}, r"array \['x'\] is float32; a source takes arrays"),
        ({"x": [np.zeros(3), np.zeros(3)], "y": [0, 1]}, "equal lengths"),
        ({}, "at least one array"),
        (np.zeros((0, 3)), "at least one example"),
        ([], "no examples"),
        ({"train": ManyItems([1]), "test": ManyItems([2])}, "is ManyItems; a source"),
        ("cifar10", "cannot be made of str.*datasets.load"),
        (iterables_examples.Loader(2, 2), r"Loader.*loader\.dataset"),
        (Endless(), "Endless, which has no __len__"),
        (Repeated(), r"Repeated: it has 4,611,686,018,427,387,904 examples or no end"),
        (Uncounted(), r"Uncounted: len\(\) of it raises TypeError: the number of"),
        ((i for i in range(3)), r"generator.*no index; give hetjax\.stream"),
        (object(), r"object; give an array"),
        ({"x": np.ones(3, np.longdouble)}, r"\['x'\] has dtype float128.*astype"),
        ({"x": jax.random.split(jax.random.key(0), 3)}, r"\['x'\] JAX array.*key_data"),
        ({"train": ArrowTable(x=[1, 2])}, r"\['train'\] is a table \(ArrowTable\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_a_source_is_refused_with_what_to_give(data, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        sources.as_source(data)


def test_text_is_refused_before_anything_is_compiled():
    def never(params, batch, rng):
        raise AssertionError("traced")

    items = [{"text": "a long text that nobody wants to read", "label": 0}] * 4
    fields = {"workers": 1, "microbatch_size": 2}
    message = r"example 0.*\['text'\] is str \('a long text that nob.*numbers"
    weights, good = np.zeros(2, np.float32), np.zeros((8, 2), np.float32)
    with pytest.raises(ValueError, match=message):
        hetjax.Run(never, weights, None, items, **fields)
    with pytest.raises(ValueError, match=message):
        hetjax.fit(never, weights, optax.sgd(0.1), good, eval_source=items, **fields)


N = 16
X = np.arange(1, N + 1, dtype=np.float32) / N
COLUMNS = {"x": X, "y": 2 * X}
FIELDS = {"workers": 2, "local": "virtual", "microbatch_size": 4, "budget": 4, "progress": False}


def squares(slope, batch, rng=None):
    return (batch["x"] * slope - batch["y"]) ** 2


def slope_of(source, loss=squares):
    found = hetjax.fit(loss, np.float32(0), optax.sgd(0.1), source, epochs=60, **FIELDS)
    return float(found.params)


def records():
    return np.rec.fromarrays(COLUMNS.values(), names="x,y")


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def stream(batches, **fields):
    return hetjax.stream(batches, **{"examples_per_epoch": N, "batched": True, **fields})


TABLES = {
    "records": records,
    "a structured array": lambda: np.array(records().tolist(), [("x", ">f4"), ("y", "f8")]),
    "a list of records": lambda: list(records()),
    "columns of one's own": lambda: ArrowTable(**COLUMNS),
    "a table of pyarrow": lambda: library("pyarrow").table(COLUMNS),
    "a batch of pyarrow": lambda: library("pyarrow").RecordBatch.from_pydict(COLUMNS),
    "columns of pyarrow": lambda: dict(COLUMNS, x=library("pyarrow").array(X)),
    "a stream of tables": lambda: stream([ArrowTable(x=X[:9], y=2 * X[:9]), records()[9:]]),
    "pandas": lambda: library("pandas").DataFrame(COLUMNS),
    "polars": lambda: library("polars").DataFrame(COLUMNS),
    "bytes in the other order": lambda: {"x": X.astype(">f4"), "y": (2 * X).astype(">f8")},
    "items with them": lambda: [{"x": x, "y": 2 * x} for x in X.astype(">f4").reshape(N, 1)],
    "empty fields": lambda: {**COLUMNS, "none": (), "of 0": np.zeros((N, 0), ">i4")},
    "no mask": lambda: {"x": np.ma.array(X), "y": np.ma.array(2 * X, mask=np.zeros(N, bool))},
}


@pytest.mark.parametrize("kind", TABLES)
def test_rows_are_the_examples_of_a_table(kind):
    source = sources.as_source(TABLES[kind]())
    assert len(source) == N
    first = sources.read(source, 0)
    assert all(first[name].dtype.isnative for name in "xy")
    if np.ndim(first["x"]) == 0:
        assert slope_of(source) == pytest.approx(2, abs=0.03)


def masked(form):
    rows = {"x": X, "y": np.ma.masked_array(2 * X, np.arange(N) % 4 == 0)}
    items = [{"x": X[i], "y": rows["y"][i : i + 1].reshape(())} for i in range(N)]
    batched = [{name: np.ma.stack([i[name] for i in items[:4]]) for name in "xy"}]
    return {
        "arrays": rows,
        "records": np.ma.masked_array(records(), mask=np.arange(N) > 14),
        "items": items,
        "stream": stream(items, batched=False),
        "batches": stream(batched, examples_per_epoch=4),
        "views": hetjax.augmented({"x": X, "y": X}, lambda example, rng: items[0]),
    }[form]


@pytest.mark.parametrize("form", ["arrays", "records", "items", "stream", "batches", "views"])
def test_masked_numbers_are_refused_and_left_out_by_weights(form):
    message = r"masked in \d+ places.*\.filled\(0\).*weights=~mask"
    with pytest.raises(ValueError, match=message):
        slope_of(masked(form))
    if form in ("arrays", "items"):
        with pytest.raises(ValueError, match=message):
            hetjax.evaluate(np.float32(2), masked(form), lambda p, b: {"loss": squares(p, b)})
    if form == "arrays":  # what the sentence says
        rows = masked(form)
        rows |= {"y": rows["y"].filled(0), "mask": rows["y"].mask}

        def loss(slope, batch, rng):
            return hetjax.Losses(squares(slope, batch), weights=~batch["mask"])

        assert slope_of(rows, loss) == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize("loss", [squares, lambda p, b, rng: squares(p, {"x": b["x"] @ b["y"]})])
def test_a_list_of_batches_or_of_nothing_is_told_of(loss):
    batches = [{"x": X[at : at + 8], "y": 2 * X[at : at + 8]} for at in (0, 8)]
    with pytest.raises(ValueError, match=r"If the data are a list of batches, join.*batched=True"):
        hetjax.fit(loss, np.float32(0), optax.sgd(0.1), batches, epochs=1, **FIELDS)
    assert slope_of(stream(batches)) == pytest.approx(2, abs=0.03)
    with pytest.raises(ValueError, match="example 0 cannot be used: it holds nothing"):
        slope_of([()] * N)
