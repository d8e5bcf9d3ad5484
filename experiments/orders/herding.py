"""How small does an order keep the sums of gradients? The herding bound, beside the loss.

At the end of an epoch the bound of the order to come is found, and that of a random one, at the
parameters that were reached. An order is found while the parameters move: what is left of its
balance is what it can be worth in the epoch to come. A round counts as one timestep. The clock of a
run is not looked at.
"""

import functools
import itertools
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetjax
from experiments.orders import arms, runs
from experiments.orders.results import Records, tuned_rates
from experiments.orders.tasks import Run, Task
from hetjax import types
from hetjax.data import stream as stream_lib
from hetjax.local import gradients, rules
from hetjax.rounds import run_state

_TIMES = 5  # in a run


def wanted(task: Task, trained: Records, measured: Records) -> list[Run]:
    """The runs that are to be done once more, with the first seed, to measure their orders."""
    if task.group:
        return []
    rates = tuned_rates(task, trained)
    if arms.LEADER not in rates:
        return []
    run = Run(task, arms.LEADER, rates[arms.LEADER], task.seeds[0])
    return [run] if run.key in trained and run.key not in measured else []


def measure(run: Run, data_dir: str | None) -> dict[str, Any]:
    """Does a run again without evaluation, and measures the orders of some epochs.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    every = max(1, run.task.experiment.epochs // _TIMES)
    began, epochs, found = time.perf_counter(), [], []
    with hetjax.Run(**runs.open_run(run, data_dir).arguments()) as training:
        bounds, state, done = Bounds(training), training.init(), 0
        quotas: np.ndarray | None = None
        while not training.done(state):
            state, report = training.round(state)
            if (line := report.read()).counts.full or quotas is None:
                quotas = np.array(line.quotas)
            epoch = training.setup.stream.epoch(state.stream)
            if epoch > done and not epoch % every:
                epochs.append(epoch)
                found.append(bounds(state, quotas))
            done = epoch
    return runs.named(run) | {
        "epochs": epochs,
        **{name: [runs.rounded(bounds[name]) for bounds in found] for name in found[0]},
        "secs": round(time.perf_counter() - began, 1),
    }


class Bounds:
    """The herding bound of the order to come, and of a random one, at the same parameters.

    Costs three passes over the data, forward and backward (the mean gradient, then both orders),
    on one device; no gradient is kept but that of the round in hand, the mean and the sum so far.
    """

    def __init__(self, run: hetjax.Run) -> None:
        self._run, setup = run, run.setup
        rule = gradients.gradient_sums(
            setup.loss_fn,
            per_example_rng=setup.per_example_rng,
            loss_divisor=setup.programs.main.rule.observed.divisor,
        )
        self._steps = rules.with_observer(rule)
        self._add = jax.jit(self._steps.add, donate_argnums=(1,))

    def __call__(self, state: run_state.RunState, quotas: np.ndarray) -> dict[str, float]:
        """`inf_norm`, `two_norm` and `random_` of both, in rounds of these quotas."""
        run, stream = self._run, self._run.setup.stream
        epoch, rounds = stream.epoch(state.stream), state.rounds
        in_rounds = _whole_pass(stream, rounds.stream, quotas)
        random_order = np.random.default_rng((run.config.seed, epoch, 0x4E8D))
        shuffled = np.arange(stream.num_examples)
        for shard in stream.shards:
            shuffled[shard] = random_order.permutation(shard)
        sums = functools.partial(self._gradient_sums, run.params(state)[0], epoch)
        mean: Any = 0.0
        count = 0
        for gradient_sum, num_examples in sums(in_rounds):
            mean, count = mean + gradient_sum, count + num_examples
        mean = mean / max(count, 1)
        found: dict[str, float] = {}
        for whose, order in (("", in_rounds), ("random_", [shuffled[ids] for ids in in_rounds])):
            prefix, norms = 0 * mean, [(0.0, 0.0)]
            for gradient_sum, num_examples in sums(order):
                prefix += gradient_sum - num_examples * mean
                norms.append((np.abs(prefix).max(), np.sqrt(np.square(prefix).sum())))
            most = np.max(norms, axis=0).tolist()
            found |= zip((f"{whose}inf_norm", f"{whose}two_norm"), most, strict=True)
        return found

    def _gradient_sums(
        self, params: types.PyTree, epoch: int, rounds: Iterable[np.ndarray]
    ) -> Iterable[tuple[np.ndarray, int]]:
        """(f64[d], number of examples in it) of each round."""
        setup, size = self._run.setup, self._run.config.microbatch_size
        shared = types.Shared(params)
        zeros = self._steps.begin(shared, (), ())
        for ids in rounds:
            carried = jax.tree.map(jnp.copy, zeros)
            for start in range(0, len(ids), size):
                row = np.full(size, stream_lib.PADDING, np.int32)
                part = ids[start : start + size]
                row[: len(part)] = part
                carried, _ = self._add(shared, carried, setup.feed.load(0, row, epoch), setup.rng)
            leaves = jax.tree.leaves(jax.device_get(carried.sums.grad_sum))
            flat = np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])
            yield flat, int(carried.tally.example_count)


def _whole_pass(
    stream: stream_lib.Stream, state: stream_lib.StreamState, quotas: np.ndarray
) -> list[np.ndarray]:
    """The ids i32[k] of each round of a whole pass by the present orders and these quotas.

    In private data, until each worker with a quota has done its whole pass.
    """
    parts = []
    counts = quotas.reshape(len(stream.shards), -1).sum(1) * stream.microbatch_size
    for shard, own, count in zip(stream.shards, state.passes, counts.tolist(), strict=True):
        ids = shard[own.order_state.order]
        starts = range(0, len(ids), count) if count else ()
        parts.append([ids[start : start + count] for start in starts])
    return [
        np.concatenate([ids for ids in of_round if ids is not None])
        for of_round in itertools.zip_longest(*parts)
    ]
