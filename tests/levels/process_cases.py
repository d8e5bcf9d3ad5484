"""One process of a bilevel run of several.

    python -m tests.levels.process_cases PROCESS_ID NUM_PROCESSES COORDINATOR CASES OUT

CASES maps a name to the kind of estimator, outer steps and fields of `fit_bilevel`; process 0
writes OUT/NAME.npz and .json.
"""

import json
import pathlib
import signal
import sys

import jax
import numpy as np
import optax

import hetjax
from hetjax.processes import join, membership
from tests.levels import problems


def main(process_id, num_processes, coordinator, cases, out):
    place = membership.find(int(process_id), int(num_processes), coordinator)
    join.join(place)
    hetjax.use_cpu_workers(4 // place.num_processes)
    jax.config.update("jax_enable_x64", True)
    for name, case in json.loads(pathlib.Path(cases).read_text()).items():
        kind, steps = case.pop("kind"), case.pop("steps")
        problem, x, y, estimator = problems.given(kind)
        of_upper, of_lower = problems.sources()
        last, at = case.pop("last_step", None), case.pop("signal_at", None)

        def callback(line, last=last, at=at):
            if line.step == at and place.process_id:
                signal.raise_signal(signal.SIGTERM)
            return line.step == last and place.process_id == 1

        result = hetjax.fit_bilevel(
            problem,
            x,
            y,
            estimator,
            optax.sgd(0.2, momentum=0.5),
            upper_source=of_upper,
            lower_source=of_lower,
            outer_steps=steps,
            eval_source=of_upper,
            callbacks=[callback],
            progress=False,
            loss_over="microbatch",
            raise_on_interrupt=False,
            microbatch_size=2,
            **case,
        )
        if not place.process_id:
            leaves = jax.tree.leaves(result.params)
            np.savez(pathlib.Path(out) / f"{name}.npz", *map(np.asarray, leaves))
            told = {"summary": result.summary, "history": result.history}
            (pathlib.Path(out) / f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
