"""One process of a run of several: trains each case of a JSON file, one after the other.

    python -m tests.rounds.process_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to the fields of `problems.fit`, with `loss_fn` by its name there and `rule` by
its name in `RULES`, and `last_round`, after which a callback ends the run, and `update_secs`, which
each process takes longer between two local phases; process 0 writes OUT/NAME.npz and .json, process
I OUT/NAME.I.json. A case of the rule `hessian_product` is rounds without update, and its `params`
are what they found.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax.comm import shared_sums, socket_allgather
from tests.own_parts import hessian_product, local_sgd
from tests.rounds import gangs, problems


def hessian_product_and_ones(loss_fn):
    """Contributes an array that is of the same shape whatever a round is given, too."""
    rule = hessian_product.hessian_product(loss_fn)

    def finish(shared, worker, sums):
        product, weight = sums
        return worker, (jnp.full(5, weight), product), weight

    return rule._replace(finish=finish)


INNER = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
RULES = {
    "local_sgd": lambda loss_fn: local_sgd.local_sgd(loss_fn, optax.sgd(0.1, momentum=0.9)),
    "hessian_product": hessian_product_and_ones,
    "local_steps": lambda loss_fn: hetjax.local_steps(INNER),
    "fednova": lambda loss_fn: hetjax.local_steps(INNER, weights="fednova", keep=False),
}

add_up, connect, post = shared_sums.add_up, socket_allgather.connect, shared_sums.SharedSums.post
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


def resolved(fields):
    """The fields with functions in place of their names."""
    loss_fn = getattr(problems, fields.get("loss_fn", "softmax_loss"))
    rule = {"rule": RULES[fields["rule"]](loss_fn)} if "rule" in fields else {}
    update = {"optimizer": optax.adam(0.05)} if fields.get("optimizer") == "adam" else {}
    return {**fields, "loss_fn": loss_fn, **rule, **update}


def trained(result):
    """Parameters; with their average where the run keeps one."""
    if result.ema_params is None:
        return result.params
    return np.stack([result.params, result.ema_params])


def products(data, weights, rounds=3, **fields):
    """(what rounds without update found, their quotas), each with a vector of its own."""
    loss_fn, found, quotas = fields.pop("loss_fn"), [], []
    fields = {"microbatch_size": 4, "budget": 8, **fields}
    with hetjax.Run(loss_fn, weights, None, data, **fields) as run:
        state = run.init(given=np.zeros_like(weights))
        for seed in range(rounds):
            given = np.random.default_rng(seed).normal(size=weights.shape)
            state, report = run.round(state, given=given)
            ones, product = (np.asarray(leaf.addressable_data(0)[0]) for leaf in report.mean)
            np.testing.assert_allclose(ones, 1.0, rtol=1e-12)
            found.append(product)
            quotas.append(report.read().quotas)
    return np.stack(found), quotas


def main(process_id, num_processes, coordinator, cases, out):
    place = gangs.joined(process_id, num_processes, coordinator)
    jax.config.update("jax_enable_x64", True)
    socket_allgather.connect, shared_sums.add_up = recorded, counted
    for name, fields in json.loads(pathlib.Path(cases).read_text()).items():
        last_round = fields.pop("last_round", None)
        update_secs = fields.pop("update_secs", [0.0] * place.num_processes)
        shared_sums.SharedSums.post = slowed(post, update_secs[place.process_id])
        added.clear()
        callbacks = [problems.press_ctrl_c(lambda line, last=last_round: line.round == last)]
        problem = problems.classification(), problems.initial_weights()
        if fields.get("rule") == "hessian_product":
            params, quotas = products(*problem, **resolved(fields))
            best, told = params, {"summary": {}, "history": [{"quotas": each} for each in quotas]}
        else:
            result = problems.fit(*problem, callbacks=callbacks, **resolved(fields))
            params, best = trained(result), result.best_params
            told = {"summary": result.summary, "history": result.history}
        path = pathlib.Path(out) / name
        if place.process_id:
            path.with_suffix(f".{place.process_id}.json").write_text(json.dumps(told))
        else:
            np.savez(path.with_suffix(".npz"), params=params, best=best)
            told["summary"]["by_sockets"] = bool(connected) and connected[-1] is not None
            told["summary"]["times_added"] = len(added)
            path.with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
