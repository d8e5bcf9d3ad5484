"""How did a process of a run end? What it tells the other processes and the launcher of its end.

An `ExitReport` goes over the board to the other processes, and into the directory that the launcher
gave its workers. Standard library alone: the launcher reads it, too.
"""

import contextlib
import json
import pathlib
import time
import traceback
from typing import NamedTuple

from hetjax import whole
from hetjax.liveness import blocking_waits

INTERRUPTED = 130
MOST_CHARACTERS = 500  # of `ExitReport.words`
_MOST_OF_TRACE = 10_000  # characters, the last ones
_SUFFIX = ".ending"
OF_INPUT = ("raised ValueError", "raised DisagreementError")
"""Begin the words of what comes again where it came before the first round."""


class ExitReport(NamedTuple):
    """The end of a process that the others cannot go on without.

    Args:
        process: whose end it is.
        words: what it did, to stand behind its name: "raised ValueError: no such file".
        trace: the traceback of what it raised, or "".
        code: the exit code of the processes that end because of it.
        time: monotonic seconds when it was told; processes of one machine share that clock.
    """

    process: int
    words: str
    trace: str = ""
    code: int = 1
    time: float = 0.0


def of_error(process: int, error: BaseException) -> ExitReport:
    """The end of a process by an exception that was not caught.

    Example:
        >>> of_error(1, ValueError("no such file")).words
        'raised ValueError: no such file'
        >>> of_error(1, SystemExit(3)).words
        'left by SystemExit(3)'
    """
    now = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return ExitReport(process, "was interrupted (KeyboardInterrupt)", "", INTERRUPTED, now)
    if isinstance(error, SystemExit):
        return ExitReport(process, f"left by {error!r}"[:MOST_CHARACTERS], "", 1, now)
    said = f"{type(error).__qualname__}: {error}".splitlines()[0].removesuffix(": ")
    trace = "".join(traceback.format_exception(error))[-_MOST_OF_TRACE:]
    return ExitReport(process, f"raised {said}"[:MOST_CHARACTERS], trace, 1, now)


def is_loss_of_others(error: BaseException) -> bool:
    """Whether an error, JAX's or our own, says that another process of the run is gone.

    With JAX 0.12 a failed collective is a ValueError, as mistakes of the user are.
    """
    if isinstance(error, blocking_waits.LostProcessError):
        return True
    if "Duplicate GPU" in str(error):  # NCCL's word of processes that share one
        return False
    words: tuple[str, ...] = ("Gloo", "NCCL")
    if isinstance(error, RuntimeError):
        words += ("UNAVAILABLE", "Connection")
    elif not isinstance(error, ValueError):
        return False
    return any(word in str(error) for word in words)


def write(directory: pathlib.Path, teller: int, ending: ExitReport) -> None:
    """Tells the launcher. The file is written whole or not at all; a full disk raises nothing."""
    path = directory / f"process-{teller}{_SUFFIX}"
    with contextlib.suppress(OSError), whole.written(path) as new:
        new.write_text(json.dumps(ending))


def read(directory: pathlib.Path) -> ExitReport | None:
    """The first ending that a worker told; None where there is none."""
    told = []
    for path in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            told.append(ExitReport(*json.loads(path.read_text())))
    return min(told, key=lambda ending: ending.time, default=None)
