"""What does a round of many unequal workers take on one device, over what its microbatches take?

    python -m experiments.benchmarks.virtual [--workers=64] [--turns=5]

The workers are virtual; their quotas are 1 to 16 in turn. A microbatch takes a worker's share of a
call in which all of them take part. Rounds of both kinds in turn, medians.
"""

import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax
from absl import flags

import hetjax
from experiments import command_line, problems
from experiments.benchmarks import rows
from hetjax import quota

_WORKERS = flags.DEFINE_integer("workers", 64, "How many.", 1)
_TURNS = flags.DEFINE_integer("turns", 5, "Rounds of each kind.", 1)

LOCAL = "local steps"
_MOST = 16  # microbatches of a worker
_SHAPE = (32, 32, 3)


def seconds(quotas: Sequence[int], turns: int, rule: str) -> list[float]:
    """Of rounds with these quotas, but for the first."""
    loss_fn, params = problems.classifier("lenet", _SHAPE, input_max=255.0)
    policy = quota.QuotaPolicy(
        lambda workers, budget: 0,
        lambda state, total, caps: (np.array(quotas), state),
        lambda state, times: state,
    )
    options = {"rule": hetjax.local_steps(optax.sgd(0.01))} if rule == LOCAL else {}
    found = []
    with hetjax.Run(
        loss_fn,
        params,
        optax.sgd(1.0),
        problems.images(sum(quotas) * 8 * (turns + 2), _SHAPE),
        microbatch_size=8,
        budget=sum(quotas),
        quota=policy,
        local="virtual",
        cluster={"num_workers": len(quotas), "secs_per_microbatch": [1.0] * len(quotas)},
        **options,
    ) as run:
        state = run.init()
        for _ in range(turns + 1):
            began = time.perf_counter()
            state, _ = run.round(state)
            jax.block_until_ready(state.train.params)
            found.append(time.perf_counter() - began)
    return found[1:]


def measured(rule: str) -> rows.Found:
    workers, turns = _WORKERS.value, _TURNS.value
    unequal = [1 + worker % _MOST for worker in range(workers)]
    whole = statistics.median(seconds([_MOST] * workers, turns, rule)) / (_MOST * workers)
    over = [secs / (sum(unequal) * whole) for secs in seconds(unequal, turns, rule)]
    yield rows.Row(f"{rule}: over its microbatches", "≤ 1.3", rows.middle(over), turns)
    yield f"{workers} workers, LeNet, microbatches of 8, of which one takes {1e3 * whole:.2f} ms."


def main() -> None:
    rows.print_tables(
        {rule: lambda rule=rule: measured(rule) for rule in ("all-reduce", LOCAL)}, []
    )


if __name__ == "__main__":
    command_line.run(main)
