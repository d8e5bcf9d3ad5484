"""The state of a run in a file in memory, from a process that has it to one that joins.

JSON in front says where each array lies. Nothing is ever unpickled.
"""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from hetjax import whole


def write(path: pathlib.Path, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Writes it whole or not at all.

    Args:
        path: of the file.
        arrays: by name.
        about: JSON values.

    Raises:
        OSError: there is no room.
    """
    index = {name: [str(array.dtype), array.shape] for name, array in arrays.items()}
    head = json.dumps([index, about]).encode()
    with whole.written(path) as new, open(new, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `write` was given.

    Raises:
        EOFError: the file is empty.
    """
    content = np.fromfile(path, np.uint8)
    if not content.size:
        raise EOFError
    length = int.from_bytes(content[:8].tobytes(), "little")
    index, about = json.loads(content[8 : 8 + length].tobytes())
    arrays, at = {}, 8 + length
    for name, (kind, shape) in index.items():
        dtype = jnp.dtype(kind)
        size = int(np.prod(shape, dtype=int)) * dtype.itemsize
        arrays[name] = np.frombuffer(content[at : at + size].tobytes(), dtype).reshape(shape)
        at += size
    return arrays, about
