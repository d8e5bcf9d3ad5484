"""Runs on two clients of XLA in one process, as a GPU and the CPU are: no program spans both.

python -m tests.rounds.platform_cases
"""

import functools

import jax
import jax.extend.backend
import numpy as np
from jaxlib import xla_client

from tests.rounds import problems

SECOND = "second"
QUOTAS = {"policy": "static", "proportions": (3, 1, 2)}
# What is asked of a run of three workers beside the platforms.
CASES = {
    "sums": {"dispatch_depth": 2},
    "signs": {"ordering": "d_grab"},
    "gossip": {"reducer": {"name": "d_psgd", "graph": "ring"}},
    "private": {"data": {"sharing": "private"}},
    "stateful": {"loss_fn": problems.stateful_softmax_loss},
    "round": {"loss_fn": problems.contrastive_loss},
}


def ran(**fields):
    examples, weights = problems.classification(64), problems.initial_weights()
    return problems.fit(examples, weights, **{"epochs": 2, "quota": QUOTAS, **fields})


def refused(platforms, num_workers):
    cluster = {"platforms": platforms, "num_workers": num_workers}
    try:
        ran(quota="equal", cluster=cluster)
    except ValueError as error:
        return str(error)
    return "nothing"


def main():
    client = functools.partial(xla_client.make_cpu_client, num_devices=2)
    jax.extend.backend.register_backend_factory(SECOND, client, priority=-1000)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    both = {"platforms": ("cpu", SECOND), "num_workers": 3}
    assert jax.devices(SECOND)[0].client is not jax.devices()[0].client
    for name, fields in CASES.items():
        ours = ran(**fields, cluster=both)
        others = fields | {"local": "virtual", "dispatch_depth": 1}
        like = ran(**others, cluster={"num_workers": 3})
        gap = max(
            np.abs(np.asarray(a) - b).max() / np.abs(b).max()
            for a, b in zip(*map(jax.tree.leaves, (ours.params, like.params)), strict=True)
        )
        quotas = [line["quotas"] for line in ours.history]
        assert quotas == [line["quotas"] for line in like.history]
        done = [run.summary["examples_processed"] for run in (ours, like)]
        assert done[0] == done[1] >= 124
        print(f"{name} {gap:.1e}")
    slow = {"secs_per_microbatch": (0.01, 0.01, 0.3)}
    closed = ran(cluster=both | slow, quota="equal", gate="first", budget=6)
    left = [sum(line["quotas"]) - sum(line["microbatches_done"]) for line in closed.history]
    print(closed.summary["examples_processed"], sum(left))
    adapted = ran(cluster={"platforms": ("cpu", SECOND)}, quota="adaptive")
    print(adapted.summary["examples_processed"], len(adapted.history[-1]["quotas"]))
    print(refused(("cpu", "rocket"), 3))
    print(refused((SECOND, "cpu"), 3))
    print(refused(("cpu", SECOND), 2))


if __name__ == "__main__":
    main()
