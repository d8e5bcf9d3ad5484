"""Where do the files of a run lie? On a disk: it locks, appends to and renames them."""

import os
import pathlib
import re


def on_disk(given: str | os.PathLike[str]) -> pathlib.Path:
    """The absolute path of a file or directory, though a callback may change the directory.

    Raises:
        ValueError: it is an address, as of a bucket.

    Example:
        >>> on_disk("runs/../mine").is_absolute()
        True
    """
    text = os.fspath(given)
    if re.match(r"[A-Za-z][\w+.-]+:/|file:|hdfs:", text):
        raise ValueError(f"{text!r} is an address; give a directory on a disk, or mount it as one")
    return pathlib.Path(text).expanduser().absolute()
