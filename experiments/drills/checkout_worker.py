"""What `checkouts` runs in each checkout: every arm's task, one after the other.

    python -P -m experiments.drills.checkout_worker CHECKOUT ARMS DIRECTORY

The environment's PYTHONPATH has the hetjax of CHECKOUT, and the `experiments` that this file is of
That hetjax may be older or newer than this file, so only public names are used that all
of them have, and what a run leaves in its directory. ARMS is a JSON list; each arm gets a directory
of its name with `result.npz`, `told.json` and what its task leaves, or with `error.txt`.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable

import jax
import numpy as np

import hetjax
from experiments.drills import checkout_tasks as tasks
from experiments.drills import checkout_workdirs as workdirs

_ARMS_PER_CACHE = 25  # compiled programs are forgotten then
_TASKS: dict[str, Callable[[tasks.Arm, pathlib.Path], tasks.Found]] = {
    "cut": tasks.cut_and_resumed,
    "loop": tasks.looped,
    "replay": workdirs.replayed,
    "go on": workdirs.gone_on,
}


def main(checkout: str, arms: str, directory: str) -> None:
    """Runs all arms one after the other; process 0 writes."""
    if not pathlib.Path(hetjax.__file__).resolve().is_relative_to(checkout):
        sys.exit(f"hetjax was imported from {hetjax.__file__}, and not from {checkout}")
    hetjax.join_processes()
    number = int(os.environ.get("HETJAX_PROCESS_ID", "0"))
    hetjax.use_cpu_workers(4 // int(os.environ.get("HETJAX_NUM_PROCESSES", "1")))
    _leave_out_pictures()
    for index, arm in enumerate(json.loads(pathlib.Path(arms).read_text())):
        own = pathlib.Path(directory, arm["name"])
        own.mkdir(parents=True, exist_ok=True)
        try:
            found = _TASKS[arm["task"]](arm, own)
        except Exception:
            (own / "error.txt").write_text(traceback.format_exc())
            continue
        if number == 0:
            (own / "told.json").write_text(json.dumps(found.told))
            np.savez(own / "new.npz", **found.arrays)  # type: ignore[arg-type]
            (own / "new.npz").replace(own / "result.npz")
        if index % _ARMS_PER_CACHE == _ARMS_PER_CACHE - 1:
            jax.clear_caches()


def _leave_out_pictures() -> None:
    """The page of a run takes a third of its time; where it lies elsewhere it is made."""
    for module, name in (("hetjax.report", "write_report"), ("hetjax.report.bilevel", "write")):
        with contextlib.suppress(ImportError):
            report = importlib.import_module(module)
            if hasattr(report, name):
                setattr(report, name, lambda *args, **fields: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
