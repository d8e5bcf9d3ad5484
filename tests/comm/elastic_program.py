"""A run of least squares whose workers come and go: prints what each process has of it at the end.

python -m tests.comm.elastic_program '{"workdir": …, "secs": …}'
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax

SIZE = 480


def problem(secs=0.0):
    """`(loss_fn, data)`; a microbatch takes so long."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZE, 6))
    data = {"x": x, "y": x @ np.arange(6.0) + 0.1 * rng.normal(size=SIZE)}

    def pause(x):
        time.sleep(secs)
        return np.zeros_like(x)

    def loss_fn(params, batch, rng):
        losses = (batch["x"] @ params - batch["y"]) ** 2
        if not secs:
            return losses
        shape = jax.ShapeDtypeStruct((), losses.dtype)
        return losses + jax.pure_callback(pause, shape, jax.lax.stop_gradient(losses.sum()))

    return loss_fn, data


INNER = {"name": "sgd", "learning_rate": 0.01, "momentum": 0.5}


def fit(
    *, secs=0.0, raises_at=-1, evaluates=False, writes=False, rates=(0.02,), steps=None, **fields
):
    """The run; a callback raises at a round. The worst evaluation is the best, so that an early one
    is; lines go into a table; workers have learning rates in turn; they take steps of their own by
    these options."""
    rate = rates[int(os.environ.get("HETJAX_PROCESS_ID", 0)) % len(rates)]
    loss_fn, data = problem(secs)
    if evaluates:
        fields |= {"eval_source": data, "best_by": "loss", "best_mode": "max"}
    if writes:
        fields["writers"] = [hetjax.writers.csv()]

    optimizer = optax.sgd(rate, momentum=0.5)
    if steps is not None:
        fields["rule"], optimizer = hetjax.local_steps(INNER, **steps), optax.sgd(1.0)

    def callback(report):
        if report.round == raises_at:
            raise ValueError("enough")

    given = {"epochs": 6, "quota": "adaptive", "seed": 3, "loss_over": "microbatch"}
    given |= {"microbatch_size": 4, "budget": 12, "progress": False, "callbacks": [callback]}
    return hetjax.fit(loss_fn, jnp.zeros(6), optimizer, data, **given | fields)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    hetjax.join_processes()
    result = fit(**json.loads(sys.argv[1]))
    told = {
        "leads": hetjax.leads(),
        "rounds": len({line["round"] for line in result.history}),
        "lines": len(result.history),
        "params": [float(x).hex() for x in result.params],
        "missing": result.summary["examples_missing"],
        "duplicated": result.summary["examples_duplicated"],
        "best": [float(x).hex() for x in result.best_params],
        "judged": {k: v for k, v in result.summary.items() if "test_" in k},
        "resumed": result.summary.get("resumed"),
    }
    print("result", json.dumps(told))
