"""One process of a run of several: trains each case of a JSON file, one after the other.

    python -m tests.training.process_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to the fields of `problems.fit`, with `loss_fn` by its name there, and
`last_round`, after which a callback ends the run, and `update_secs`, which each process takes
longer between two local phases; process 0 writes OUT/NAME.npz and .json.
"""

import json
import pathlib
import sys
import time

import jax
import numpy as np

import hetjax
from hetjax.cluster import exchange, processes
from hetjax.training import shared_sums
from tests.training import problems

add_up, connect, post = shared_sums.add_up, exchange.connect, shared_sums.SharedSums.post
connected, added = [], []


def recorded(*args):
    connected.append(connect(*args))
    return connected[-1]


def counted(*args):
    added.append(add_up(*args))


def slowed(function, secs):
    def call(*args):
        time.sleep(secs)
        return function(*args)

    return call


def main(process_id, num_processes, coordinator, cases, out):
    place = processes.find_place(int(process_id), int(num_processes), coordinator)
    processes.join(place)
    hetjax.use_cpu_workers(4 // place.num_processes)
    jax.config.update("jax_enable_x64", True)
    exchange.connect, shared_sums.add_up = recorded, counted
    for name, fields in json.loads(pathlib.Path(cases).read_text()).items():
        last_round = fields.pop("last_round", None)
        update_secs = fields.pop("update_secs", [0.0] * place.num_processes)
        shared_sums.SharedSums.post = slowed(post, update_secs[place.process_id])
        added.clear()
        callbacks = [lambda line, last=last_round: line.round == last]
        fields["loss_fn"] = getattr(problems, fields.get("loss_fn", "softmax_loss"))
        result = problems.fit(
            problems.classification(), problems.initial_weights(), callbacks=callbacks, **fields
        )
        if place.process_id == 0:
            path = pathlib.Path(out) / name
            np.savez(path.with_suffix(".npz"), params=result.params, best=result.best_params)
            told = {"summary": result.summary, "history": result.history}
            told["summary"]["by_sockets"] = bool(connected) and connected[-1] is not None
            told["summary"]["times_added"] = len(added)
            path.with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
