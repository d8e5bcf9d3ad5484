"""One process of a run of several: trains each case of a JSON file, one after the other.

    python -m tests.training.process_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to the fields of `problems.fit`, and `last_round`, after which a callback ends the
run; process 0 writes OUT/NAME.npz and .json.
"""

import json
import pathlib
import sys

import jax
import numpy as np

import hetjax
from hetjax.cluster import processes
from tests.training import problems


def main(process_id, num_processes, coordinator, cases, out):
    place = processes.find_place(int(process_id), int(num_processes), coordinator)
    processes.join(place)
    hetjax.use_cpu_workers(4 // place.num_processes)
    jax.config.update("jax_enable_x64", True)
    for name, fields in json.loads(pathlib.Path(cases).read_text()).items():
        last_round = fields.pop("last_round", None)
        callbacks = [lambda line, last=last_round: line.round == last]
        result = problems.fit(
            problems.classification(), problems.initial_weights(), callbacks=callbacks, **fields
        )
        if place.process_id == 0:
            path = pathlib.Path(out) / name
            np.savez(path.with_suffix(".npz"), params=result.params, best=result.best_params)
            told = {"summary": result.summary, "history": result.history}
            path.with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
