"""One process of a run of several that trains on sources which are read anew: see `test_streams`.

    python -m tests.rounds.stream_processes PROCESS_ID NUM_PROCESSES COORDINATOR OUT

Process 0 writes OUT/NAME.npz of each case. The last one is refused.
"""

import pathlib
import sys

import numpy as np

import hetjax
from tests.data import iterables_examples as given
from tests.rounds import gangs, test_augmented, test_iterables


def cases():
    """Sources by name, and fields of the run."""
    return {
        "stream": (
            hetjax.stream(given.generator(), examples_per_epoch=61, buffer_size=9),
            test_iterables.fit,
        ),
        "short": (
            hetjax.stream(given.generator(99), examples_per_epoch=61),
            test_iterables.fit,
        ),
        "augmented": (
            hetjax.augmented(test_augmented.rows(), test_augmented.noisy),
            test_augmented.fit,
        ),
    }


def fit(source, by):
    result = by(source, quota="equal", cluster={"num_workers": 4})
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0
    return result


def main(process_id, num_processes, coordinator, out):
    place = gangs.joined(process_id, num_processes, coordinator)
    for name, (source, by) in cases().items():
        result = fit(source, by)
        if not place.process_id:
            params = result.params["w"] if isinstance(result.params, dict) else result.params
            done = result.summary["examples_processed"]
            np.savez(pathlib.Path(out) / f"{name}.npz", params=params, done=done)
    differing = (given.example(at + place.process_id) for at in range(99))
    fit(hetjax.stream(differing, examples_per_epoch=61), test_iterables.fit)


if __name__ == "__main__":
    main(*sys.argv[1:])
