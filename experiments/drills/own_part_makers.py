"""Parts of one's own that are right but for one function, whose value a mutation changes.

The factory of each part is named `own_…`, and its functions stand in it: so a message that names
either of them names the part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hetjax
from hetjax import gates, ordering, quota, topology
from hetjax.cluster import emulate
from hetjax.ordering import orders

WORKERS, BUDGET, SIZE, EXAMPLES = 4, 8, 2, 37
SPEEDS = (1.0, 2.0, 3.0, 6.0)
_RNG = np.random.default_rng(0)
DATA = {
    "x": _RNG.normal(size=(EXAMPLES, 3)).astype(np.float32),
    "y": _RNG.normal(size=EXAMPLES).astype(np.float32),
}
Change = Callable[[Any], Any]


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    return (batch["x"] @ params - batch["y"]) ** 2


class State(NamedTuple):
    weights: np.ndarray  # f64[n]
    rounds: int
    seen: tuple[float, ...] = ()


def own_policy(at: str = "", change: Change = lambda made: made) -> quota.QuotaPolicy:
    def changed(name: str, made: Any) -> Any:
        return change(made) if name == at else made

    def init(num_workers: int, budget: int) -> Any:
        return changed("init", State(np.ones(num_workers), 0))

    def assign(state: Any, total: int, caps: np.ndarray) -> Any:
        quotas = quota.largest_remainder(np.ones(len(caps)), total, caps=caps)
        return changed("assign", (quotas, state))

    def observe(state: Any, times: quota.RoundTimes) -> Any:
        return changed("observe", state._replace(rounds=state.rounds + 1))

    def of_epochs(rounds: int) -> Any:
        return changed("of_epochs", quota.QuotaPolicy(init, assign, observe))

    def balanced_shares() -> Any:
        return changed("proportions", (1.0,) * WORKERS)

    shares = balanced_shares() if at == "proportions" else None
    return quota.QuotaPolicy(init, assign, observe, proportions=shares, of_epochs=of_epochs)


def own_order(at: str = "", change: Change = lambda made: made, **fields: Any) -> Any:
    inner = orders.random_reshuffling()

    def init(num_examples: int, seed: tuple[int, ...]) -> Any:
        made = inner.init(num_examples, seed)
        return change(made) if at == "init" else made

    def place(state: Any, realised_examples: Any, example_signs: Any) -> Any:
        made = inner.place(state, realised_examples, example_signs)
        return change(made) if at == "place" and made.pass_index else made

    def balances(pass_index: int) -> Any:
        return change(True)

    def make_observer(sizes: ordering.Sizes) -> Any:
        made = ordering.pair_balance().make_observer(sizes)
        if at != "observe":
            return change(made) if at == "make_observer" else made
        return made._replace(observe=lambda *given: change(made.observe(*given)))

    if at in ("balances", "make_observer", "observe"):
        fields["make_observer"] = make_observer
    if at == "balances":
        fields["balances"] = balances
    return ordering.Ordering(init, place, **fields)


def with_order(change: Change) -> Change:
    """A change of the order that a state shows."""
    return lambda state: state._replace(order=change(state.order))


class Counted(gates.AlwaysOpen):
    """Closes after four microbatches of all workers."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.done = change, 0

    def begin(self, quotas: np.ndarray) -> None:
        super().begin(quotas)
        self.done = 0

    def is_open(self) -> Any:
        return self.change(self.done < 4)

    def finished(self, worker: int, microbatches_done: int) -> None:
        with self._lock:
            self.done += 1


def own_gate(at: str = "", change: Change = lambda made: made) -> gates.Gate:
    def opened(board: Any, clock: Any) -> Any:
        made = Counted(change if at == "is_open" else lambda answer: answer)
        return change(made) if at == "open" else made

    def closes_at(ends: np.ndarray, quotas: np.ndarray) -> Any:
        flat = np.sort(ends.reshape(*ends.shape[:-2], -1), axis=-1)
        made = flat[..., min(4, flat.shape[-1]) - 1]
        return change(made) if at == "closes_at" else made

    return gates.Gate(opened, closes_at)


def own_reducer(at: str = "", change: Change = lambda made: made) -> topology.Reducer:
    def collective(sums: Any, axis_name: str) -> Any:
        total = jax.tree.map(lambda x: jax.lax.psum(x, axis_name), sums)
        rank = jax.lax.axis_index(axis_name)
        return change((total, rank)) if at == "collective" else total

    def make(facts: topology.Facts) -> Any:
        made = topology.Reduction(collective)
        return change(made) if at == "make" else made

    return topology.Reducer(make, keeps_replicas_equal=True)


def of_sums(change: Callable[[Any], Any]) -> Change:
    """A change of each sum."""
    return lambda made: jax.tree.map(change, made[0])


def own_rule(at: str = "", change: Change = lambda made: made) -> hetjax.LocalRule:
    def begin(shared: Any, worker: Any) -> Any:
        made = worker, (jnp.zeros_like(shared.params), jnp.zeros(()))
        return change(made) if at == "begin" else made

    def add(shared: Any, worker: Any, sums: Any, microbatch: Any, rng: Any) -> Any:
        def total(params: Any) -> Any:
            return (loss_fn(params, microbatch.examples, rng) * microbatch.example_mask).sum()

        grads, weight = jax.grad(total)(shared.params), microbatch.example_mask.sum()
        made = worker, (sums[0] + grads, sums[1] + weight)
        return change(made) if at == "add" else made

    def finish(shared: Any, worker: Any, sums: Any) -> Any:
        made = worker, *sums
        return change(made) if at == "finish" else made

    return hetjax.LocalRule(begin, add, finish)


class OwnCluster(emulate.EmulatedCluster):
    """A cluster with functions of one's own."""

    def __init__(self, at: str = "", change: Change = lambda made: made) -> None:
        super().__init__(SPEEDS)
        object.__setattr__(self, "change", {at: change})

    def _changed(self, name: str, made: Any) -> Any:
        return self.change.get(name, lambda same: same)(made)

    def present_at(self, round: int) -> Any:
        return self._changed("present_at", super().present_at(round))

    def microbatch_ends(self, round: int, worker: int, count: int) -> Any:
        return self._changed("microbatch_ends", super().microbatch_ends(round, worker, count))


class OwnSource:
    """The data set, one example at a time."""

    def __init__(self, at: str = "", change: Change = lambda made: made) -> None:
        self._at, self._change = at, change
        if at == "__getitems__":
            self.__getitems__ = lambda ids: change([self[index] for index in ids])

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        made = {"x": DATA["x"][index], "y": DATA["y"][index]}
        return self._change(made) if self._at == "__getitem__" and index == 5 else made


def own_metrics(change: Change) -> Callable[[Any, Any], Any]:
    def own_metrics_fn(params: Any, batch: Any) -> Any:
        return change({"loss": loss_fn(params, batch, None)})

    return own_metrics_fn


def own_callback(answer: Any) -> Callable[[Any], Any]:
    def own_callback_fn(line: Any) -> Any:
        return answer

    return own_callback_fn
