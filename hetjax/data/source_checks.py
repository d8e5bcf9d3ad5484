"""Can what a user gives be a source? Opens tables; refuses the rest, and says what to give instead.

It reads nothing and imports no library: it knows a table or a loader by its attributes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

_STREAM = "hetjax.stream(…, examples_per_epoch=N)"
_MOST_EXAMPLES = 2**31 - 1  # ids are i32

_SOURCES = "an array, a dict or tuple of arrays, or what has __len__ and __getitem__"


def opened(data: Any) -> Any:
    """The columns of a table as arrays by name; anything else as it is.

    Raises:
        ValueError: no source can be made of it. The message says what it is, and what to give.
    """
    if isinstance(data, Mapping | np.ndarray | tuple):
        return data
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas, Polars
        return {name: data[name].to_numpy() for name in data.columns}
    if hasattr(data, "column_names") and hasattr(data, "column"):  # pyarrow
        return {name: np.asarray(data[name]) for name in data.column_names}
    if hasattr(data, "to_numpy"):  # a column; the index of a pandas Series is no id
        return np.asarray(data) if hasattr(data, "__array__") else data.to_numpy()
    if refused := _refusal(data):
        raise ValueError(f"a source cannot be made of {refused}")
    return data


def _refusal(data: Any) -> str:
    """What is wrong with it, and what to give instead; '' if it has examples by index."""
    name = type(data).__name__
    if isinstance(data, str | bytes):
        return f"{name}; hetjax.zoo.datasets.load takes the name of a data set"
    is_loader, has_index = hasattr(data, "batch_size"), hasattr(data, "__getitem__")
    if hasattr(data, "dataset") and is_loader and not has_index:
        return f"{name}, which is a loader; give the data set in it, loader.dataset, or {_STREAM}"
    if hasattr(data, "__iter__") and not (hasattr(data, "__len__") and has_index):
        return f"{name}, which has no index; give {_STREAM}, or list(…) of it"
    if not has_index:
        return f"{name}; give {_SOURCES}"
    if not hasattr(data, "__len__"):
        return f"{name}, which has no __len__: how many examples an epoch has"
    try:
        length = len(data)
    except OverflowError:  # it has more examples than Python can count
        length = _MOST_EXAMPLES + 1
    except Exception as error:
        return f"{name}: len() of it raises {type(error).__name__}: {error}"
    if length == 0:
        return f"{name}: it has no examples"
    if length > _MOST_EXAMPLES:
        return f"{name}: it has {length:,} examples or no end, and {_MOST_EXAMPLES:,} are the most"
    return ""
