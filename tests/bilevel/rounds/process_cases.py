"""One process of a bilevel run of several.

    python -m tests.bilevel.rounds.process_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to the kind of estimator, outer steps and fields of `fit_bilevel`, with `late`, a
place of `LATE` to which process 1 comes when process 0 has said in OUT/said-0 that it waits for it;
process 0 writes OUT/NAME.npz and .json.
"""

import json
import pathlib
import re
import signal
import sys
import time

import jax
import numpy as np

import hetjax
from hetjax import process_info
from hetjax.bilevel.rounds import stepping
from hetjax.comm import join
from hetjax.liveness import stall_reporter
from hetjax.rounds import state as state_lib
from tests.bilevel.rounds import problems, test_fitting

PATIENCE_SECS = 300
LATE = {
    "synchronise": (stepping.Stepping, "end"),
    "read the rows of all workers": (state_lib, "all_rows"),
}


def come_late(place, said):
    """Process 1 comes to a place of `LATE` for the first time when process 0 waits for it there."""
    owner, name = LATE[place]
    function = getattr(owner, name)
    line = re.compile(rf"process 0 has waited \d+ s for process 1 \(.*\) to {place}$", re.M)
    deadline = time.monotonic() + PATIENCE_SECS

    def call(*args):
        while not line.search(said.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return function(*args)

    setattr(owner, name, call)


def main(process_id, num_processes, coordinator, cases, out):
    place = process_info.find(int(process_id), int(num_processes), coordinator)
    join.join(place)
    hetjax.use_cpu_workers(4 // place.num_processes)
    jax.config.update("jax_enable_x64", True)
    stall_reporter.PERIOD_SECS = 1.0
    for name, case in json.loads(pathlib.Path(cases).read_text()).items():
        kind, steps = case.pop("kind"), case.pop("steps")
        if (late := case.pop("late", None)) and place.process_id:
            come_late(late, pathlib.Path(out) / "said-0")
        last, at = case.pop("last_step", None), case.pop("signal_at", None)

        def callback(line, last=last, at=at):
            if line.step == at and place.process_id:
                signal.raise_signal(signal.SIGTERM)
            return line.step == last and place.process_id == 1

        fields = {"eval_source": problems.sources()[0], "callbacks": [callback], "local": "stepped"}
        result = test_fitting.fit(kind, steps, **{**fields, **case})
        if not place.process_id:
            leaves = jax.tree.leaves(result.params)
            np.savez(pathlib.Path(out) / f"{name}.npz", *map(np.asarray, leaves))
            told = {"summary": result.summary, "history": result.history}
            (pathlib.Path(out) / f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
