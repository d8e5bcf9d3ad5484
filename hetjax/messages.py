"""What a run tells its user beside its results: by `logging`, and on stderr where none takes it.

Each module that speaks has a logger of its name. A user silences them by
`logging.getLogger("hetjax").setLevel(logging.ERROR)`, and collects what is said by a handler there
or on the root logger.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


class OnStderr(logging.Handler):
    """Prints what no handler of the user's gets, on a line of its own, above a bar that moves.

    Whether there is another handler is asked at each message: one may come after the import.
    """

    def emit(self, record: logging.LogRecord) -> None:
        above = logging.root.handlers if logger.propagate else []
        if any(not isinstance(h, OnStderr | logging.NullHandler) for h in logger.handlers + above):
            return
        who = "hetjax.launch" if record.name.startswith("hetjax.launch") else "hetjax"
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        try:
            with bars.external_write_mode(sys.stderr) if bars else contextlib.nullcontext():
                print(f"{who}: {record.getMessage()}", file=sys.stderr)
        except (OSError, ValueError):  # stderr is not read any more; the run goes on
            self.handleError(record)


@contextlib.contextmanager
def as_mistake(before: str, kinds: Any = ValueError, *, after: str = "") -> Iterator[None]:
    """Has an error of these kinds leave the context as a `ValueError`, in words around its own.

    Args:
        before: the words in front, up to the colon.
        kinds: the class of these errors, or a tuple of such.
        after: the words behind.

    Example:
        >>> with as_mistake("--port=x: ", after="; give a number"):
        ...     raise ValueError("no number")
        Traceback (most recent call last):
        ValueError: --port=x: no number; give a number
    """
    try:
        yield
    except kinds as error:
        raise ValueError(f"{before}{error}{after}") from error


logger = logging.getLogger("hetjax")
logger.addHandler(OnStderr())
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
