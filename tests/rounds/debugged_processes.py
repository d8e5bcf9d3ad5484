"""One process of a run of two: debugs, meets a number that is not finite, and is ended by a signal.

python -m tests.rounds.debugged_processes PROCESS_ID NUM_PROCESSES COORDINATOR
"""

import signal
import sys

import jax
import numpy as np

import hetjax
from tests.rounds import gangs, problems, test_nonfinite


def main(process_id, num_processes, coordinator):
    place = gangs.joined(process_id, num_processes, coordinator)
    jax.config.update("jax_enable_x64", True)
    data, weights = problems.classification(64), problems.initial_weights()
    fields = {"epochs": 1, "budget": 4, "max_rounds": 2}
    plain, debugged = (problems.fit(data, weights, debug=d, **fields).params for d in (False, True))
    np.testing.assert_allclose(debugged, plain, rtol=0, atol=1e-12)
    print("debugged as one", file=sys.stderr)
    try:
        loss_fn = test_nonfinite.log_of_what_is_bad
        problems.fit(test_nonfinite.examples(), weights, loss_fn=loss_fn, **fields)
    except hetjax.NonFiniteError as error:
        print("named:", error, file=sys.stderr)

    def press(line):
        if line.round == 0 and place.process_id:
            signal.raise_signal(signal.SIGTERM)

    try:
        problems.fit(
            data,
            weights,
            callbacks=[press],
            raise_on_interrupt=True,
            **{**fields, "epochs": 50, "max_rounds": 0},
        )
    except SystemExit as error:
        rounds = error.result.summary["rounds"]
        print(f"the result so far has {rounds} rounds", file=sys.stderr)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
