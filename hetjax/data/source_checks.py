"""Can what a user gives be a source? Opens tables; refuses the rest, and says what to give instead.

It reads nothing and imports no library: it knows a table or a loader by its attributes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

_STREAM = "hetjax.stream(…, examples_per_epoch=N), which goes through it as it comes"
_MOST_EXAMPLES = 2**31 - 1  # ids are i32

_SOURCES = (
    "a NumPy array, a dict or tuple of arrays of equal length (one entry an example), or an object "
    "with __len__ and __getitem__ (tfds.data_source, a Grain source, a Hugging Face data set, a "
    "list of examples)"
)


def opened(data: Any) -> Any:
    """The columns of a table as arrays; anything else as it is.

    Raises:
        ValueError: no source can be made of it. The message says what it is, and what to give.
    """
    if isinstance(data, Mapping):
        _refuse_splits(data)
        return data
    if isinstance(data, np.ndarray | tuple):
        return data
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas, Polars
        return {name: data[name].to_numpy() for name in data.columns}
    if hasattr(data, "iloc") and hasattr(data, "to_numpy"):  # a pandas Series; its index is no id
        return data.to_numpy()
    refused = _refusal(data)
    if refused:
        raise ValueError(f"a source cannot be made of {refused}")
    return data


def _refusal(data: Any) -> str:
    """What is wrong with it, and what to give instead; '' if it has examples by index."""
    name = type(data).__name__
    if isinstance(data, str | bytes):
        return f"{name}; give {_SOURCES}; the name of a data set goes to hetjax.zoo.datasets.load"
    if isinstance(data, type):
        return f"the class {data.__name__}; give an instance of it, {data.__name__}(…)"
    is_iterable = hasattr(data, "__iter__") and not hasattr(data, "__len__")
    if is_iterable or not hasattr(data, "__getitem__"):
        return f"{name}: {_without_index(data)}"
    if not hasattr(data, "__len__"):
        return (
            f"{name}: it has no __len__, and an epoch needs an end. Define __len__; where examples "
            "are made without end, return how many an epoch is to have"
        )
    try:
        length = len(data)
    except OverflowError:  # it has more examples than Python can count
        length = _MOST_EXAMPLES + 1
    except Exception as error:
        return f"{name}: len() of it raises {type(error).__name__}: {error}. Give {_SOURCES}"
    if length == 0:
        return f"{name}: it has no examples, len({name}) is 0"
    if length > _MOST_EXAMPLES:
        return (
            f"{name}: it has {length:,} examples or no end, and {_MOST_EXAMPLES:,} are the most. "
            "Give the data once, without repeating them (epochs= says how often they are gone "
            "through), or a __len__ of as many examples as an epoch is to have"
        )
    return ""


def _without_index(data: Any) -> str:
    """What to give instead of something that has no `__getitem__`."""
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        return (
            "a loader cuts batches in an order of its own, which hetjax does here. Give the data "
            "set in it, loader.dataset; microbatch_size= says the size, ordering= the order, "
            "data={'readers': N} how many threads read. Where the data have no index, give "
            f"{_STREAM}"
        )
    if hasattr(data, "__next__"):
        return (
            "what can be gone through once, in one order, is no source: hetjax reads by index, "
            f"each epoch in another order. Give {_STREAM}; or list(…) of it if it ends and fits "
            "into memory (list(itertools.islice(…, N)) of one without end), or an object with "
            "__len__ and __getitem__"
        )
    if hasattr(data, "__iter__"):
        return (
            "it is made to be gone through, and hetjax reads by index, each epoch in another "
            f"order. Give {_STREAM}; or list(…) of it if it ends and fits into memory, or a form "
            "of it with __getitem__ and __len__ (a Hugging Face data set without streaming, "
            "tfds.data_source for tf.data)"
        )
    return f"it has no __getitem__ and no examples. Give {_SOURCES}"


def _refuse_splits(data: Mapping) -> None:
    """Refuses a dict of data sets, such as `load_dataset` of Hugging Face returns."""
    for name, each in data.items():
        has_examples = hasattr(each, "__getitem__") and hasattr(each, "__len__")
        if not has_examples or hasattr(each, "__array__"):
            continue
        if not isinstance(each, str | bytes | list | tuple | Mapping):
            raise ValueError(
                f"a source cannot be made of a dict of data sets, {sorted(map(str, data))}: "
                f"{name!r} is a {type(each).__name__}. Give one of them, such as "
                f"source=data[{name!r}], and another one as eval_source"
            )
