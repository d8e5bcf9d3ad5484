"""One process of a run of two, of which process 1 computes something in another way.

    python -m tests.rounds.gathering_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASE OUT

Each process writes OUT/PROCESS_ID.npz: its parameters, and what it planned for the exchanges.
"""

import json
import pathlib
import sys

import numpy as np
import optax

from hetjax.local import gradients
from hetjax.quota import policies
from hetjax.topology import gossip, schedules
from tests.own_parts import local_sgd
from tests.rounds import gangs, problems

ROUNDS = 2000  # that are planned
made = []


def with_other_last_bits(solve):
    def solved(*args, **options):
        found = solve(*args, **options)
        probabilities = np.nextafter(found.probabilities, 0)
        return found._replace(probabilities=probabilities, alpha=np.nextafter(found.alpha, 0))

    return solved


def with_other_flags(flags):
    def flagged(schedule, round, seed):
        found = flags(schedule, round, seed)
        return ~found if round == 3 else found

    return flagged


def own_equal(process_id):
    """Equal quotas, made by hand; process 1 turns those of a round round."""
    policy = policies.equal()

    def assign(state, total, caps):
        quotas, state = policy.assign(state, total, caps)
        return quotas[::-1].copy() if total == 7 and process_id == 1 else quotas, state

    return policy._replace(assign=assign)


def kept(make):
    def recorded(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    return recorded


def given_otherwise(other, process_id):
    """The data, and what else `fit` is given."""
    data, power = problems.classification(), 1 + process_id
    rule = gradients.gradient_sums(problems.softmax_loss)
    finish = rule.finish

    def scaled(*arguments):
        worker, grads, weight = finish(*arguments)
        return worker, grads * power, weight

    given = {
        "closed rule": {"rule": rule._replace(finish=scaled)},
        "rate": {"optimizer": optax.sgd(0.1 * power)},
        "loss": {"loss_fn": lambda *given: problems.softmax_loss(*given) ** power},
    }
    if other == "of the leader" and process_id == 0:
        given[other] = {
            "metrics_fn": lambda params, batch: {
                "loss": problems.softmax_loss(params, batch, None)
            },
            "eval_source": data,
            "callbacks": [lambda report: None],
        }
    if other == "shards":
        data = {name: array[process_id:202:2] for name, array in data.items()}
    if other == "form":
        data = {"x": np.tile(data["x"], 1 + process_id), "y": data["y"]}
        given[other] = {"data": {"sharing": "process_local"}}
    if other == "sizes" and process_id == 1:
        data = {name: array[:40] for name, array in data.items()}
    return data, given.get(other, {})


def main(process_id, num_processes, coordinator, case, out):
    case = json.loads(case)
    place = gangs.joined(process_id, num_processes, coordinator)
    weights = problems.initial_weights(np.float32)
    if place.process_id == 1:
        if case["other"] == "last bits":
            schedules.matcha_schedule = with_other_last_bits(schedules.matcha_schedule)
        if case["other"] == "flags":
            schedules.Schedule.flags = with_other_flags(schedules.Schedule.flags)
        if case["other"] == "parameters":
            weights = np.nextafter(weights, np.float32(0))
    if case["other"] == "quotas":
        case["fields"]["quota"] = own_equal(place.process_id)
    if case["other"] == "rule" and place.process_id == 1:
        case["fields"]["rule"] = local_sgd.local_sgd(problems.softmax_loss, optax.sgd(0.1))
    gossip.matcha = kept(gossip.matcha)
    data, given = given_otherwise(case["other"], place.process_id)
    result = problems.fit(data, weights, **given, **case["fields"])
    arrays = {"params": result.params, "weights": [], "active": []}
    if made:
        active = np.array([made[-1].active(round) for round in range(ROUNDS)])
        arrays |= {"weights": made[-1].weights, "active": active}
    np.savez(pathlib.Path(out) / f"{process_id}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
