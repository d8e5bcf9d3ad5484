"""Training with balanced orders beside the slow reference: what both runs do is compared."""

import functools
import pathlib
import tempfile

import numpy as np
import optax

from hetjax import ordering
from hetjax import parts as parts_lib
from tests.rounds import problems
from tests.rounds.order_reference import (
    BUDGET,
    EPOCHS,
    LEARNING_RATE,
    MOMENTUM,
    SIZE,
    WORKERS,
    private_shards,
    reference_run,
)

RUN = {"epochs": EPOCHS, "microbatch_size": SIZE, "budget": BUDGET}


def recorded(method, calls):
    """The ordering; what each commit places is kept in `calls`."""

    def place(state, examples, signs):
        calls.append((examples, signs))
        return method.place(state, examples, signs)

    return method._replace(place=place)


def made(name, **options):
    """The ordering of this name, with those of the options that it has."""
    factory = ordering.ORDERINGS[name]
    known = parts_lib.options_of(factory)
    return factory(**{k: v for k, v in options.items() if k in known})


@functools.cache
def private_rounds():
    """Metrics of rounds that private data can serve: of an adaptive run on changing speeds."""
    with tempfile.TemporaryDirectory() as directory:
        change = {"round": 9, "worker": 0, "secs_per_microbatch": 5.0}
        cluster = {"secs_per_microbatch": (1, 2, 3, 4), "changes": [change]}
        fields = {"cluster": {"num_workers": WORKERS, **cluster}, "local": "virtual"}
        result = problems.train(
            103, data={"sharing": "private"}, workdir=directory, **fields, **RUN
        )
        lines = pathlib.Path(directory, "metrics.jsonl").read_text()
    return lines, [line["quotas"] for line in result.history]


def compare_with_reference(path, method, local, sharing, **options):
    """Unequal and changing quotas, an odd number of examples, a last partial microbatch."""
    data, weights = problems.classification(103), problems.initial_weights()
    if sharing == "shared":
        totals = problems.round_totals(103, EPOCHS, SIZE, BUDGET)
        trace = problems.write_trace(path / "metrics.jsonl", totals, WORKERS)
    else:
        lines, trace = private_rounds()
        (path / "metrics.jsonl").write_text(lines)
    commits, expected = reference_run(
        data, weights, trace, method=method, sharing=sharing, **options
    )
    optimizer, calls = optax.sgd(LEARNING_RATE, momentum=MOMENTUM), []
    fields = {"ordering": recorded(made(method, **options), calls), "local": local, **RUN}
    fields |= {"data": {"sharing": sharing}, "replay": str(path / "metrics.jsonl")}
    result = problems.fit(data, weights, optimizer=optimizer, **fields)
    if sharing == "private":  # commits are positions in the worker's shard there
        shards = private_shards(103)
        of_shard = {int(example): i for shard in shards for i, example in enumerate(shard)}
        commits = [([of_shard[e] for e in examples], signs) for examples, signs in commits]
    assert len(calls) == len(commits)
    for (examples, signs), (right_units, right_signs) in zip(calls, commits, strict=True):
        np.testing.assert_array_equal(examples, right_units)
        np.testing.assert_array_equal(signs, right_signs)
    np.testing.assert_allclose(result.params, expected, rtol=1e-9)
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
