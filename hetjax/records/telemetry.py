"""What is an order worth in a run, and what does it cost? Measured beside the training.

The run's clock stands still meanwhile. Both use the parameters and the data as they are and
change nothing.
"""

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import types
from hetjax.data import stream as stream_lib
from hetjax.ordering import herding
from hetjax.ordering import ordering as ordering_lib
from hetjax.rounds import gradients, rules, run_state
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import setup as setup_lib

_COST_REPEATS = 5


class OrderTelemetry:
    """Both measurements for a run, when its configuration asks for them."""

    def __init__(self, setup: setup_lib.Setup) -> None:
        self._setup, self._measure = setup, Herding(setup)

    def cost(self, params: types.PyTree, stream: stream_lib.StreamState) -> dict[str, float]:
        """What the order's signs cost; empty where it takes none, or nothing is to be measured."""
        setup = self._setup
        asked = setup.methods.observer is not None and setup.config.ordering.herding_every != 0
        if not asked or setup.config.debug:  # eager calls tell nothing of the cost
            return {}
        assert setup.methods.observer is not None
        plan = setup.stream.plan(stream, np.ones(len(setup.where.devices), int))
        return cost(
            setup.loss_fn,
            setup.methods.observer,
            params,
            setup.feed.load(0, plan.example_ids[0], plan.passes[0]),
            setup.rng,
            per_example_rng=setup.per_example_rng,
        )

    def herding(
        self, epochs_done: int, model: types.PyTree, state: run_state.RunState
    ) -> dict[str, float] | None:
        """The bounds of the order to come, in rounds of the last quotas; None where not due."""
        setup, every = self._setup, self._setup.config.ordering.herding_every
        if every < 0:
            at_an_end = epochs_done == 1 or epochs_done >= setup.config.epochs
            due = setup.methods.observer is not None and at_an_end
        else:
            due = every > 0 and epochs_done % every == 0
        if not due or setup.config.debug:
            return None
        order = setup.stream.whole_pass(state.stream, state.rounds.full_quotas)
        bounds = self._measure(model, order, epochs_done)
        return {"epoch": epochs_done, **bounds}


class Herding:
    """The herding bound of the order to come, and of a random one, at the same parameters.

    Costs three passes over the data, forward and backward (the mean gradient, then both orders),
    on one device; no gradient is kept but that of the round in hand, the mean and the sum so
    far. A round counts as one timestep.
    """

    def __init__(self, setup: setup_lib.Setup) -> None:
        self._setup, self._size = setup, setup.config.microbatch_size
        rule = gradients.gradient_sums(
            setup.loss_fn,
            per_example_rng=setup.per_example_rng,
            loss_divisor=setup.programs.main.rule.loss_divisor,
        )
        self._steps = rules.with_observer(rule)
        self._add = jax.jit(self._steps.add, donate_argnums=(1,))

    def __call__(
        self,
        params: types.PyTree,
        rounds: Sequence[np.ndarray],
        epoch: int,
    ) -> dict[str, float]:
        """Both bounds in both norms, and the seconds it took.

        Args:
            params: without worker axis, on the first worker's device; or a `Model`.
            rounds: for each round of the order the ids of its examples, i32[k].
            epoch: that begins; names the random order, and the views that a source has in it.
        """
        began = time.perf_counter()
        stream = self._setup.stream
        random_order = np.random.default_rng((self._setup.config.seed, epoch, 0x4E8D))
        shuffled = np.arange(stream.num_examples)
        for shard in stream.shards:
            shuffled[shard] = random_order.permutation(shard)
        sums = functools.partial(self._gradient_sums, params, epoch)
        mean: Any = 0.0
        count = 0
        for gradient_sum, num_examples in sums(rounds):
            mean, count = mean + gradient_sum, count + num_examples
        mean = mean / max(count, 1)
        found = {}
        for whose, order in (("", rounds), ("random_", [shuffled[ids] for ids in rounds])):
            bound = herding.RunningBound(mean)
            for gradient_sum, num_examples in sums(order):
                bound.add(gradient_sum, num_examples)
            found[f"{whose}inf_norm"] = bound.inf_norm
            found[f"{whose}two_norm"] = bound.two_norm
        return {**found, "secs": time.perf_counter() - began}

    def _gradient_sums(
        self, params: types.PyTree, epoch: int, rounds: Iterable[np.ndarray]
    ) -> Iterable[tuple[np.ndarray, int]]:
        """(f64[d], number of examples in it) of each round."""
        model = params if isinstance(params, types.Model) else types.Model(params, ())
        shared = types.Shared(model.params, model_state=model.state)
        zeros = self._steps.begin(shared, (), ())
        for ids in rounds:
            carried = jax.tree.map(jnp.copy, zeros)
            for start in range(0, len(ids), self._size):
                row = np.full(self._size, stream_lib.PADDING, np.int32)
                part = ids[start : start + self._size]
                row[: len(part)] = part
                self._setup.company.beacons.at("evaluating")
                microbatch = self._setup.feed.load(0, row, epoch)
                carried, _ = self._add(shared, carried, microbatch, self._setup.rng)
            yield _flat(carried.sums.grad_sum), int(carried.tally.example_count)


def cost(
    loss_fn: losses_lib.LossFn,
    observer: ordering_lib.Observer,
    params: types.PyTree,
    microbatch: types.Microbatch,
    rng: jax.Array,
    *,
    per_example_rng: bool,
) -> dict[str, float]:
    """Seconds of a microbatch with and without the order's signs, one device alone, and memory.

    Medians of a few calls, in turn. Bytes are those of one worker, `memory` and
    `evidence` together.
    """
    calls = []
    rule = gradients.gradient_sums(loss_fn, per_example_rng=per_example_rng)
    shared = types.Shared(params)
    for own in (observer, None):
        steps = rules.with_observer(rule, own)
        carried = steps.begin(shared, (), () if own is None else own.init(params))
        calls.append((jax.jit(steps.add, donate_argnums=(1,)), jax.tree.map(jnp.copy, carried)))
    secs = np.zeros((_COST_REPEATS + 1, 2))
    for repeat in range(len(secs)):
        for index, (add, carried) in enumerate(calls):
            began = time.perf_counter()
            carried, _ = jax.block_until_ready(add(shared, carried, microbatch, rng))
            secs[repeat, index] = time.perf_counter() - began
            calls[index] = add, carried
    balanced, plain = np.median(secs[1:], axis=0)  # the first compiles
    kept = jax.eval_shape(lambda p: (m := observer.init(p), observer.begin_round(m)), params)
    return {
        "param_bytes": _num_bytes(params),
        "running_sum_bytes": _num_bytes(kept),
        "microbatch_secs": float(balanced),
        "plain_microbatch_secs": float(plain),
    }


def _flat(tree: types.PyTree) -> np.ndarray:
    """f64[d], on the host."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
