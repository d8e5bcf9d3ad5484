"""The files of a run that a program here writes beside those of `hetjax.fit_bilevel`."""

import pathlib

from hetjax import whole


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file: a kill now, or a full disk, leaves the file as it was."""
    with whole.written(path) as new:
        new.write_text(text)
