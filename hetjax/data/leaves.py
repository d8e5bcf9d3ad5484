"""What an example is made of: a pytree of numbers, without JAX.

Dicts, tuples and lists are the inner nodes, and so are structured arrays and records: they become
dicts of their fields. But a list of plain Python numbers is one array, and so is a list of such
lists of equal length, as a table in JSON is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hetjax import messages

PyTree = Any

_NUMBERS = (bool, int, float)
_SHOWN = 20  # characters of a text in a message

_MASKED = (
    "which no loss would see: give .filled(0) and the mask as two fields, and have the loss return "
    "hetjax.Losses(losses, weights=~mask)"
)
_NUMBERS_ALONE = "training needs numbers: tokenise text, or drop the field"
_WIDE = "which 32 bits do not hold; number the values anew, or set jax_enable_x64"


def _opened(tree: PyTree) -> PyTree:
    """The fields of a structured array or of a record as a dict; anything else as it is."""
    names = getattr(getattr(tree, "dtype", None), "names", None)
    return {name: tree[name] for name in names} if isinstance(names, tuple) else tree


def _children(tree: PyTree) -> list[tuple[Any, PyTree]] | None:
    """What a dict, tuple or list holds, by key or position; None of a leaf."""
    if isinstance(tree, Mapping):
        return [(key, tree[key]) for key in sorted(tree, key=str)]
    if isinstance(tree, tuple | list) and not _list_shape(tree):
        return list(enumerate(tree))
    return None


def walk(tree: PyTree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths; dicts by sorted key, so two items compare leaf by leaf."""
    tree = _opened(tree)
    children = _children(tree)
    if children is None:
        yield path, tree
    for key, child in children or ():
        yield from walk(child, f"{path}[{key!r}]")


def rebuild(tree: PyTree, leaves: Iterator[Any]) -> PyTree:
    """A tree of the same form with other leaves, given in the order of `walk`."""
    tree = _opened(tree)
    if isinstance(tree, Mapping):
        built = {key: rebuild(tree[key], leaves) for key in sorted(tree, key=str)}
        return {key: built[key] for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[rebuild(child, leaves) for child in tree])
    if isinstance(tree, tuple | list) and not _list_shape(tree):
        return type(tree)(rebuild(child, leaves) for child in tree)
    return next(leaves)


def _list_shape(tree: Any) -> tuple[int, ...]:
    """The shape of nested lists of plain Python numbers that make one array; () of all else."""
    if type(tree) is not list or not tree:
        return ()
    if all(type(child) in _NUMBERS for child in tree):
        return (len(tree),)
    shapes = {_list_shape(child) for child in tree}
    return (len(tree), *shapes.pop()) if len(shapes) == 1 and () not in shapes else ()


def of_item(item: PyTree, index: int) -> list[tuple[str, np.ndarray]]:
    """The paths and arrays of an example.

    Raises:
        ValueError: a leaf is no number; the message names the example and the leaf.
    """
    leaves = []
    for path, leaf in walk(item):
        try:
            array = _number_array(leaf)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"example {index} cannot be used: {path or 'item'} {error}") from error
        leaves.append((path, array))
    if not leaves:
        raise ValueError(f"example {index} cannot be used: it holds nothing")
    return leaves


def of_arrays(arrays: PyTree) -> list[tuple[str, np.ndarray]]:
    """The paths and arrays of a pytree whose leaves have a leading axis of examples.

    Raises:
        ValueError: a leaf is no such array. The message names it and says what to do.
    """
    _refuse_lists(arrays, "")
    return [(path, _array_leaf(path, leaf)) for path, leaf in walk(arrays)]


def check_narrow(arrays: PyTree, example_ids: np.ndarray | None = None) -> None:
    """Refuses whole numbers that 32 bits do not hold, in arrays of 64 bits.

    Args:
        arrays: leaves `[k, ...]`, one entry an example.
        example_ids: i[k], for the message; None: 0 to k - 1.

    Raises:
        ValueError: there is one.
    """
    for path, leaf in walk(arrays):
        if leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < 8 or not leaf.size:
            continue
        narrow = np.iinfo(f"{leaf.dtype.kind}4")
        if leaf.max() <= narrow.max and leaf.min() >= narrow.min:
            continue
        at = np.argwhere((leaf > narrow.max) | (leaf < narrow.min))[0]
        which = at[0] if example_ids is None else example_ids[at[0]]
        raise ValueError(f"example {which}: leaf {path or 'item'} holds {leaf[tuple(at)]}, {_WIDE}")


def describe(leaves: list[tuple[str, tuple[int, ...], np.dtype]]) -> str:
    """The first few leaves, by path, shape and dtype, in words."""
    shown = [f"{path or 'item'} {dtype}{list(shape)}" for path, shape, dtype in leaves[:6]]
    return ", ".join(shown) + (f" and {len(leaves) - 6} more" if len(leaves) > 6 else "")


def _number_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, str | bytes):
        raise ValueError(f"is {type(leaf).__name__} ({leaf[:_SHOWN]!r}), and {_NUMBERS_ALONE}")
    if type(leaf) is int:
        try:
            return np.asarray(leaf, np.int32)
        except OverflowError:
            raise ValueError(f"is {leaf}, {_WIDE}") from None
    array = as_array(leaf)
    if not _is_numeric(array.dtype):
        raise ValueError(f"is {type(leaf).__name__} of dtype {array.dtype}, and {_mend(array)}")
    if type(leaf) is float or (type(leaf) is list and array.dtype == np.float64):
        return array.astype(np.float32)
    if type(leaf) is list and array.dtype == np.int64:
        return np.asarray(leaf, np.int32)
    return array


def _array_leaf(path: str, leaf: Any) -> np.ndarray:
    name = f"array {path}" if path else "the array"
    if type(leaf) is list:
        return _number_array(leaf)
    with messages.as_mistake(f"{name} ", (ValueError, TypeError)):
        array = as_array(leaf)
    if not hasattr(leaf, "__array__") or array.ndim == 0:
        raise ValueError(f"{name} is {type(leaf).__name__}; a source takes arrays of examples")
    if not _is_numeric(array.dtype):
        raise ValueError(f"{name} has dtype {array.dtype}, and {_mend(array)}")
    return array


def as_array(leaf: Any) -> np.ndarray:
    """What a leaf holds, in this machine's order of bytes.

    Raises:
        ValueError: no array of JAX can be made of it; what it is, and what to give.
    """
    if hasattr(leaf, "filled") and np.any(getattr(leaf, "mask", False)):
        raise ValueError(f"is masked in {np.count_nonzero(leaf.mask)} places, {_MASKED}")
    if hasattr(leaf, "column_names"):
        raise ValueError(f"is a table ({type(leaf).__name__}): give a single one, or its columns")
    array = np.asarray(leaf)
    if array.dtype.char in "gG":
        raise ValueError(f"has dtype {array.dtype}, which JAX lacks: give .astype(np.float64)")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _mend(array: np.ndarray) -> str:
    """What to do with an array that holds no numbers."""
    values = array.reshape(-1).tolist()
    if (at := _first_odd(values)) is not None:
        return f"entry {at} is {values[at]!r}, which is no number"
    if values and all(
        hasattr(value, "__len__") and not isinstance(value, str | bytes | dict) for value in values
    ):
        return "each of its entries is a row: make one array of them by np.stack"
    return _NUMBERS_ALONE


def _first_odd(values: list[Any]) -> int | None:
    """The index of the first value that is no number among numbers; None if there is none."""
    odd = [at for at, value in enumerate(values) if not isinstance(value, (*_NUMBERS, np.number))]
    single = not any(isinstance(values[at], (Mapping, list, tuple, np.ndarray)) for at in odd)
    return odd[0] if 0 < len(odd) < len(values) and single else None


def _refuse_lists(tree: PyTree, path: str) -> None:
    """Refuses lists that were meant as one array and do not make one."""
    if type(tree) is list and tree and not _list_shape(tree):
        name, at = path or "the list", _first_odd(tree)
        if at is not None:
            raise ValueError(f"{name} cannot be used: entry {at} is {tree[at]!r}, and no number")
        if any(isinstance(child, str | bytes) for child in tree):
            raise ValueError(f"{name} is a list of strings, and {_NUMBERS_ALONE}")
        rows = all(type(child) in (list, *_NUMBERS) for child in tree)
        lengths = {len(child) if rows and type(child) is list else 0 for child in tree}
        if len(lengths) > 1:
            raise ValueError(f"{name} has rows of different lengths: {sorted(lengths)}")
    for key, child in _children(tree) or ():
        _refuse_lists(child, f"{path}[{key!r}]")


def _is_numeric(dtype: np.dtype) -> bool:
    # isbuiltin == 2: types registered from outside, bfloat16 and float8 of ml_dtypes
    return dtype.kind in "biufc" or dtype.isbuiltin == 2
