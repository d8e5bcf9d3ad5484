"""What an example is made of: a pytree of numbers, without JAX.

Dicts, tuples and lists are the inner nodes. But a list of plain Python numbers is one array, and so
is a list of such lists of equal length, as a table in JSON is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

PyTree = Any

_NUMBERS = (bool, int, float)
_SHOWN = 20  # characters of a text in a message

TOKENISE = (
    "training needs numbers: tokenise the text first, each one a row of token ids (int32), cut or "
    "padded to one length, or drop the field"
)

WIDE = (
    "Number the values anew, as np.unique(ids, return_inverse=True)[1] does, drop the field where "
    "the loss does not need it, or call jax.config.update('jax_enable_x64', True) first"
)

_CLASSES = "; number labels of classes, as np.unique(labels, return_inverse=True)[1] does"
_NUMBERS_ALONE = "entry {at} is {value!r}, which is no number; give one, or leave the example out"


def walk(tree: PyTree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths; dicts by sorted key, so two items compare leaf by leaf."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from walk(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list) and not _list_shape(tree):
        for position, child in enumerate(tree):
            yield from walk(child, f"{path}[{position}]")
    else:
        yield path, tree


def rebuild(tree: PyTree, leaves: Iterator[Any]) -> PyTree:
    """A tree of the same form with other leaves, given in the order of `walk`."""
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
        _refuse_tracked(f"example {index} cannot be used: leaf {path or 'item'}", leaf)
        try:
            array = _number_array(leaf)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"example {index} cannot be used: leaf {path or 'item'} {error}"
            ) from error
        leaves.append((path, array))
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
        raise ValueError(
            f"example {which}: leaf {path or 'item'} is {leaf.dtype} and holds {leaf[tuple(at)]}, "
            f"which does not fit into the 32 bits that JAX has by default. {WIDE}"
        )


def describe(leaves: list[tuple[str, tuple[int, ...], np.dtype]]) -> str:
    """The first few leaves, by path, shape and dtype, in words."""
    shown = [f"{path or 'item'} {dtype}{list(shape)}" for path, shape, dtype in leaves[:6]]
    return ", ".join(shown) + (f" and {len(leaves) - 6} more" if len(leaves) > 6 else "")


def _number_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, str | bytes):
        shown = leaf if len(leaf) <= _SHOWN else leaf[:_SHOWN]
        dots = "" if len(leaf) <= _SHOWN else "…"
        raise ValueError(f"is {type(leaf).__name__} ({shown!r}{dots}), and {TOKENISE}")
    if type(leaf) is int:
        try:
            return np.asarray(leaf, np.int32)
        except OverflowError:
            raise ValueError(f"is {leaf}, which does not fit into 32 bits. {WIDE}") from None
    array = np.asarray(leaf)
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
    _refuse_tracked(name, leaf)
    if not hasattr(leaf, "__array__") or np.ndim(leaf) == 0:
        raise ValueError(
            f"a source of arrays takes NumPy arrays with a leading axis of examples; "
            f"{path or 'it'} is {type(leaf).__name__}"
        )
    array = np.asarray(leaf)
    if not _is_numeric(array.dtype):
        raise ValueError(f"{name} has dtype {array.dtype}, and {_mend(array)}")
    return array


def _refuse_tracked(name: str, leaf: Any) -> None:
    """Refuses a tensor of PyTorch that wants gradients, which NumPy cannot read."""
    if getattr(leaf, "requires_grad", False) is True:
        raise ValueError(
            f"{name} is a {type(leaf).__name__} with requires_grad=True, and examples are numbers "
            "without gradients. Give tensor.detach().numpy(), or make it without requires_grad"
        )


def _mend(array: np.ndarray) -> str:
    """What to do with an array that holds no numbers."""
    values = array.reshape(-1).tolist()
    at = _first_odd(values)
    if at is not None:
        return _NUMBERS_ALONE.format(at=at, value=values[at])
    if array.dtype.kind in "SUT" or any(isinstance(value, str | bytes) for value in values[:1]):
        return TOKENISE + (_CLASSES if array.ndim == 1 else "")
    if values and all(hasattr(value, "__len__") for value in values):
        if len({len(value) for value in values}) > 1:
            return "its rows have different lengths: cut or pad them to one"
        return "each of its entries is a row: make one array of them by np.stack"
    return "training needs numbers: encode it as integers or floats, or drop the field"


def _first_odd(values: list[Any]) -> int | None:
    """The index of the first value that is no number among numbers; None if there is none."""
    odd = [at for at, value in enumerate(values) if not isinstance(value, (*_NUMBERS, np.number))]
    single = not any(isinstance(values[at], (Mapping, list, tuple, np.ndarray)) for at in odd)
    return odd[0] if 0 < len(odd) < len(values) and single else None


def _refuse_lists(tree: PyTree, path: str) -> None:
    """Refuses lists that were meant as one array and do not make one."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            _refuse_lists(child, f"{path}[{key!r}]")
    elif isinstance(tree, tuple):
        for position, child in enumerate(tree):
            _refuse_lists(child, f"{path}[{position}]")
    elif type(tree) is list and tree and not _list_shape(tree):
        at = _first_odd(tree)
        if at is not None:
            shown = _NUMBERS_ALONE.format(at=at, value=tree[at])
            raise ValueError(f"{path or 'the list'} cannot be used: {shown}")
        if any(isinstance(child, str | bytes) for child in tree):
            raise ValueError(f"{path or 'the list'} is a list of strings, and {TOKENISE}{_CLASSES}")
        rows = all(type(child) in (list, *_NUMBERS) for child in tree)
        lengths = [len(child) if rows and type(child) is list else 0 for child in tree]
        odd = next((i for i, n in enumerate(lengths) if n != lengths[0]), None)
        if odd is not None:
            raise ValueError(
                f"{path or 'the list'} has rows of different lengths: row 0 has {lengths[0]} "
                f"entries, row {odd} has {lengths[odd]}; an example has one shape, so cut or pad "
                "the rows to one length, and mask the padding in the loss"
            )
        for position, child in enumerate(tree):
            _refuse_lists(child, f"{path}[{position}]")


def _is_numeric(dtype: np.dtype) -> bool:
    # isbuiltin == 2: types registered from outside, bfloat16 and float8 of ml_dtypes
    return dtype.kind in "biufc" or dtype.isbuiltin == 2
