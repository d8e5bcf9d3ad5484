"""One process of two that are told that they share a GPU; what is refused there goes to a file.

python -m tests.processes.shared_gpu PROCESS_ID NUM_PROCESSES COORDINATOR DIRECTORY
"""

import json
import pathlib
import sys

import numpy as np
import optax

import hetjax
from hetjax.processes import ways
from tests.own_parts import local_sgd
from tests.rounds import problems

REFUSED = {
    "reducer": {"reducer": "d_psgd"},
    "order": {"ordering": "d_grab"},
    "shards": {"data": {"sharing": "private"}},
    "state": {"loss_fn": problems.stateful_softmax_loss},
    "rule": {"rule": local_sgd.local_sgd(problems.softmax_loss, optax.sgd(0.1, momentum=0.9))},
}


def squares(x, y, batch):
    return (batch["x"] * y - x) ** 2


def main(process_id, num_processes, coordinator, directory):
    hetjax.join_processes(int(process_id), int(num_processes), coordinator)
    ways.share_gpus = lambda mesh, sockets: True
    data, weights, told = problems.classification(), problems.initial_weights(), {}
    fields = {"epochs": 2, "quota": "equal", "cluster": {"num_workers": 2}}
    workdir = pathlib.Path(directory, "run")
    result = problems.fit(data, weights, eval_source=data, workdir=workdir, **fields)
    told["rounds"] = result.summary["rounds"]
    for name, refused in REFUSED.items():
        try:
            problems.fit(data, weights, **fields | refused)
        except ValueError as error:
            told[name] = str(error)
    source = {"x": np.ones(16, np.float32)}
    sources = {"upper_source": source, "lower_source": source}
    estimator = hetjax.bilevel.value_gap(hetjax.bilevel.descent(optax.sgd(0.1)), 2, multiplier=1.0)
    problem, zero = hetjax.bilevel.Bilevel(squares, squares), np.float32(0)
    try:
        hetjax.fit_bilevel(problem, zero, zero, estimator, optax.sgd(0.1), outer_steps=1, **sources)
    except ValueError as error:
        told["levels"] = str(error)
    pathlib.Path(directory, f"told-{process_id}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
