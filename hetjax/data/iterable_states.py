"""The state of an iterable as JSON values: checkpoints hold it, and nothing is ever unpickled."""

import base64
import importlib
import math
from typing import Any

import numpy as np


def encode(state: Any) -> Any:
    """JSON values, from which `decode` makes the same again.

    Raises:
        TypeError: it holds something else than numbers, texts, bytes, arrays, tensors of PyTorch,
            and lists, tuples and dicts of them.

    Example:
        >>> decode(encode({"at": (1, b"a"), 2: [None, 0.5]}))
        {'at': (1, b'a'), 2: [None, 0.5]}
    """
    if state is None or isinstance(state, bool | int | str):
        return state
    if isinstance(state, float) and math.isfinite(state):
        return float(state)
    if isinstance(state, bytes):
        return ["bytes", base64.b64encode(state).decode()]
    if isinstance(state, list | tuple) and type(state) in (list, tuple):
        return [type(state).__name__, [encode(each) for each in state]]
    if isinstance(state, dict):
        return ["dict", [[encode(key), encode(value)] for key, value in state.items()]]
    if isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "biufc":
        content = base64.b64encode(np.ascontiguousarray(state).tobytes()).decode()
        return [type(state).__name__, str(state.dtype), list(state.shape), content]
    if type(state).__module__.partition(".")[0] == "torch" and hasattr(state, "numpy"):
        return ["tensor", encode(state.numpy())]
    raise TypeError(f"it holds a {type(state).__name__}")


def decode(values: Any) -> Any:
    """What `encode` was given."""
    if not isinstance(values, list):
        return values
    tag, *content = values
    if tag == "bytes":
        return base64.b64decode(content[0])
    if tag in ("list", "tuple"):
        each = [decode(value) for value in content[0]]
        return each if tag == "list" else tuple(each)
    if tag == "dict":
        return {decode(key): decode(value) for key, value in content[0]}
    if tag == "tensor":
        return importlib.import_module("torch").from_numpy(decode(content[0]).copy())
    dtype, shape, text = content
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    return array.copy() if tag == "ndarray" else array[()]
