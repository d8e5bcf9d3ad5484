"""Gates on a virtual clock, event by event, as the workers' threads would meet them.

`play` is `gates.play` with workers that die; `interleavings` runs whole epochs of random
quotas, times, gates and deaths through the data's rounds and asks the ledger. No gradients.
"""

from typing import Any

import numpy as np

from hetjax import gates
from hetjax.data import ledger
from hetjax.data import stream as stream_lib
from hetjax.ordering import orders


def options_of(trigger: str, quorum: int, deadline_secs: float) -> dict[str, Any]:
    """What a gate of these numbers takes."""
    options = {"quorum": {"quorum": quorum}, "deadline": {"deadline_secs": deadline_secs}}
    return options.get(trigger, {})


def play(trigger, ends, quotas, *, deaths: np.ndarray | None = None, **options) -> np.ndarray:
    """What each worker has finished when nothing is in flight any more: i64[W].

    Args:
        trigger: the gate's name.
        ends: f64[W, K]: when each microbatch ends, unless its worker is dead by then.
        quotas: i64[W].
        deaths: f64[W]: when each worker dies; what it had finished counts for the gate, and is
            lost.
        options: of the gate.
    """
    clock = gates.Clock()
    gate = gates.begin(gates.GATES[trigger](**options), clock=clock)
    deaths = np.full(len(quotas), np.inf) if deaths is None else deaths
    done = gates.play(gate, clock, np.where(ends < deaths[:, None], ends, np.inf), quotas)
    return np.where(deaths <= clock.now, 0, done)


def random_run(seed: int) -> tuple[int, int, int]:
    """Two epochs of one random cluster: rounds, examples missing, examples duplicated."""
    rng = np.random.default_rng((seed, 0x6A7E))
    num_workers = int(rng.integers(1, 9))
    num_examples = int(rng.integers(num_workers, 120))
    size = 2 * int(rng.integers(1, 4))
    kind = stream_lib.SharedStream if rng.random() < 0.5 else stream_lib.PrivateStream
    ordering = orders.random_reshuffling()
    stream = kind(num_examples, num_workers, microbatch_size=size, ordering=ordering, seed=seed)
    budget = int(rng.integers(num_workers, 5 * num_workers + 1))
    trigger = str(rng.choice(["none", "first", "quorum", "deadline"]))
    options = options_of(trigger, int(rng.integers(1, budget + 1)), float(rng.exponential(3)))
    present = np.ones(num_workers, bool)
    count = 0
    state = stream.init()
    while stream.epoch(state) < 2:
        count += 1
        if count > 100_000:
            raise RuntimeError(f"no end after {count} rounds: seed {seed}")
        present ^= rng.random(num_workers) < 0.1  # some leave, some come back
        if not present.any():
            present[rng.integers(num_workers)] = True
        weights = np.where(present, rng.exponential(size=num_workers), 0)
        total = stream.total(state, budget, gated=trigger != "none")
        quotas = rng.multinomial(total, weights / weights.sum())
        plan = stream.plan(state, stream.fitted(state, quotas, present))
        closes = "none" if stream.is_last(state, plan.quotas) else trigger
        shape = (num_workers, max(int(plan.quotas.max()), 1))
        secs = rng.exponential(size=shape)
        ends = np.cumsum(np.ceil(secs) if rng.random() < 0.3 else secs, axis=1)  # whole: ties
        deaths = np.where(rng.random(num_workers) < 0.05, rng.exponential(4, num_workers), np.inf)
        of_gate = options if closes == trigger else {}
        done = play(closes, ends, plan.quotas, deaths=deaths, **of_gate)
        state = stream.commit(state, plan, done)
    return count, ledger.missing(state.ledger), ledger.duplicated(state.ledger)
