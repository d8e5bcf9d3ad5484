"""One process of two that see two GPUs and are told that they share one.

Which of them JAX is to take, and what is refused there, goes to a file.

python -m tests.comm.shared_gpu PROCESS_ID NUM_PROCESSES COORDINATOR DIRECTORY
"""

import json
import pathlib
import sys

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.comm import backends, gpus
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
    gpus.visible = lambda: ["0000:07:00.0", "0000:0F:00.0"]
    hetjax.join_processes(int(process_id), int(num_processes), coordinator)
    took = jax.config.read("jax_cuda_visible_devices")
    backends.share_gpus = lambda mesh, sockets: True
    data, weights, told = problems.classification(), problems.initial_weights(), {"took": took}
    fields = {"epochs": 2, "quota": "equal", "cluster": {"num_workers": 2}}
    workdir = pathlib.Path(directory, "run")
    result = problems.fit(data, weights, eval_source=data, workdir=workdir, **fields)
    told["rounds"] = result.summary["rounds"]
    source = {"x": np.ones(16, np.float32)}
    sources = {"upper_source": source, "lower_source": source}
    estimator = hetjax.bilevel.value_gap(hetjax.bilevel.descent(optax.sgd(0.1)), 2, multiplier=1.0)
    problem, zero = hetjax.bilevel.Bilevel(squares, squares), np.float32(0)
    levels = (problem, zero, zero, estimator, optax.sgd(0.1))
    calls = {name: (problems.fit, (data, weights), fields | of) for name, of in REFUSED.items()}
    calls["levels"] = hetjax.fit_bilevel, levels, {"outer_steps": 1, **sources}
    for name, (fit, given, options) in calls.items():
        with pytest.raises(ValueError, match="share a GPU") as refused:
            fit(*given, **options)
        told[name] = str(refused.value)
    pathlib.Path(directory, f"told-{process_id}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
