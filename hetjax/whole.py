"""Files that are there whole or not at all, even if their writer is killed meanwhile.

What is written has a name of its own until it is whole. No other process ever has that name: not
one that sleeps meanwhile, and none that is given the number of a process that is gone. So no
process writes into what has taken its place.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def written(path: pathlib.Path, put: Callable[..., Any] = os.replace) -> Iterator[pathlib.Path]:
    """A name to write under; what is written there takes its place after the block.

    Args:
        path: the place.
        put: `os.link` sets a name that is not taken yet.

    Raises:
        FileExistsError: of `os.link`: it is taken.
        OSError: there is no room, or no such directory.
    """
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        yield new
        put(new, path)
    finally:
        new.unlink(missing_ok=True)
