"""One process of a run in which each has a part of the data of its own: see `test_own_parts`.

    python -m tests.rounds.own_part_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to `sizes`, of the parts, and `fields` of the run; `form` of the source; `comes`,
how many examples of a stream come in all; `changed`, whose values are others; `last_round`, at
which Ctrl-C ends the run, or `killed`, in which process 1 dies. Process I writes OUT/NAME.I.npz and
.json: what each worker did in each round of `Run`, or what `fit` left; and what was refused.
"""

import itertools
import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np
import optax

import hetjax
from tests.rounds import gangs, problems


def pooled(sizes):
    return problems.classification(sum(sizes))


class WithState:
    """Gives the examples of a part again and again, and knows where it stands."""

    def __init__(self, rows, comes):
        self.rows, self.comes, self.at = rows, comes, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < self.comes:
            self.at += 1
            yield self.rows[(self.at - 1) % len(self.rows)]


def source_of(case, own):
    ends = list(itertools.accumulate(case["sizes"], initial=0))
    data = pooled(case["sizes"])
    part = {name: array[ends[own] : ends[own + 1]] for name, array in data.items()}
    if case.get("changed") == own:
        part["x"] = part["x"] + 1
    if "form" not in case:
        return part
    rows = [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
    if case["form"] == "list":
        return rows
    comes = case.get("comes", [10**9] * len(case["sizes"]))[own]
    return hetjax.stream(WithState(rows, comes), examples_per_epoch=len(rows))


def steps(source, fields):
    """Rounds by `Run`: the parameters, and the ids that each worker did in each."""
    fields = {"microbatch_size": 4, "budget": 8, **fields}
    update, weights, done = optax.sgd(0.3, momentum=0.9), problems.initial_weights(), []
    with hetjax.Run(problems.softmax_loss, weights, update, source, **fields) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
            of_workers = map(report.done.microbatches, range(run.num_workers))
            done.append([ids[ids >= 0].tolist() for ids in of_workers])
        return run.params(state)[0], {"done": done}


def fit(source, case, own):
    def end(line):
        if own and line.round == case.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if line.round == case.get("last_round"):
            signal.raise_signal(signal.SIGINT)

    given = {"eval_source": problems.classification(16)} if own == 0 else {}
    result = problems.fit(
        source, problems.initial_weights(), callbacks=[end], **given, **case["fields"]
    )
    return result.params, {"summary": result.summary, "history": result.history}


def main(process_id, num_processes, coordinator, cases, out):
    place = gangs.joined(process_id, num_processes, coordinator)
    own = place.process_id
    jax.config.update("jax_enable_x64", True)
    for name, case in json.loads(pathlib.Path(cases).read_text()).items():
        try:
            source = source_of(case, own)
            if case.get("steps"):
                params, told = steps(source, case["fields"])
            else:
                params, told = fit(source, case, own)
        except ValueError as error:
            if case.get("raises"):
                raise
            params, told = 0.0, {"refused": str(error)}
        path = pathlib.Path(out) / f"{name}.{own}"
        np.savez(path.with_name(path.name + ".npz"), params=params)
        path.with_name(path.name + ".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
