"""What several tests look at is made by one worker of pytest-xdist, and read by the others."""

import fcntl
import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any


def once(tmp_path_factory, name: str, make: Callable[[pathlib.Path], Any]) -> Any:
    """What `make(directory)` returns, of the first worker that asks for `name`.

    Args:
        tmp_path_factory: the fixture of pytest.
        name: one for each thing of a test run.
        make: gets a new directory that stays; what it returns can be pickled.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    kept = root / f"{name}.pickle"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = make(pathlib.Path(tempfile.mkdtemp(prefix=name, dir=root)))
            kept.write_bytes(pickle.dumps(made))
    return pickle.loads(kept.read_bytes())
