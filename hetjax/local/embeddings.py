"""The two passes of a round whose loss is over all of its examples, and what is between them.

The first pass gathers embeddings: each worker puts those of its microbatches in their place among
zeros, and the synchronisation adds up. The second one pulls the gradient of the loss in them back
through each microbatch (`batch_loss.py`). Both are local rules, and do the same microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hetjax import executor, trees, types
from hetjax import mesh as mesh_lib
from hetjax.config import experiment as config_lib
from hetjax.config import kinds
from hetjax.local import gradients, rules
from hetjax.losses import batch_loss
from hetjax.losses import loss as losses_lib
from hetjax.losses import named as named_lib


class Handed(NamedTuple):
    """What the second pass is given."""

    first_ids: np.ndarray  # i32[M]: of each microbatch of the round its first example
    cotangents: types.PyTree  # leaves [M, B, ...]: the gradient of the loss in the embeddings
    direct: list[Any]  # its gradient in the parameters that it uses itself
    value: Any  # f[]: the loss
    counts: Any  # i32[]: the microbatch with which the last two are counted


class Passes:
    """The rules of both passes of a round, and what is between them.

    Args:
        loss_fn: the user's.
        params: a pytree of arrays without worker axis.
        examples: a microbatch of them.
        keys: its key, or one an example: whether `embed` gets one for each.
        num_microbatches: M, of a full round.
    """

    def __init__(
        self,
        loss_fn: batch_loss.BatchLoss,
        params: types.PyTree,
        examples: types.PyTree,
        keys: jax.Array,
        *,
        num_microbatches: int,
    ) -> None:
        self._loss, self._num = loss_fn.loss, num_microbatches
        self._size = jax.tree.leaves(examples)[0].shape[0]
        like = executor.shapes(loss_fn.embed, params, examples, keys)
        _check_mask(loss_fn.loss, params, like)

        def embedded(params: types.PyTree, microbatch: types.Microbatch, rng: jax.Array) -> Any:
            ids, _, examples = microbatch
            key = losses_lib.key_of(rng, ids, per_example_rng=keys.ndim > 0)
            return loss_fn.embed(params, examples, key)

        self._like = jax.tree.map(self._all_rows, like)
        self.gathered = jax.eval_shape(trees.accumulator_zeros, self._like)
        self._uses = _uses(loss_fn.loss, params, self._like)
        self.first = self._first(embedded)
        self.second = self._second(embedded)
        self._gradient = jax.jit(functools.partial(self._between, params))

    def _all_rows(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._num * self._size, *leaf.shape[1:]), leaf.dtype)

    def _by_microbatch(self, leaf: Any) -> tuple[int, ...]:
        return (self._num, self._size, *leaf.shape[1:])

    def _first(self, embedded: Callable) -> rules.LocalRule:
        """Puts the embeddings of each microbatch in their place among those of the round.

        Elsewhere are zeros, and the weight is 0: so the synchronisation adds up and does not
        divide, and its sums are the embeddings to the bit.
        """

        def begin(shared: types.Shared, worker: tuple) -> tuple:
            wide = jax.tree.map(lambda x: jnp.zeros(self._by_microbatch(x), x.dtype), self.gathered)
            return worker, (wide, jnp.zeros((), jnp.float32))

        def add(
            shared: types.Shared, worker: tuple, sums: Any, microbatch: types.Microbatch, rng: Any
        ) -> tuple:
            found = embedded(shared.params, microbatch, rng)
            place = jnp.argmax(shared.given == microbatch.example_ids[0])

            def put(total: jax.Array, rows: jax.Array) -> jax.Array:
                rows = rows.astype(total.dtype)
                return jax.lax.dynamic_update_index_in_dim(total, rows, place, 0)

            flaw = jnp.where(trees.all_finite(found), 0, jnp.nan).astype(sums[1].dtype)
            return worker, (jax.tree.map(put, sums[0], found), sums[1] + flaw)

        def finish(shared: types.Shared, worker: tuple, sums: Any) -> tuple:
            return worker, sums[0], jnp.zeros((), jnp.float32)

        return rules.LocalRule(begin, add, finish, checked=lambda worker, sums: sums[1])

    def _second(self, embedded: Callable) -> rules.LocalRule:
        """Pulls the gradient of the loss in the embeddings back through each microbatch."""

        def begin(shared: types.Shared, worker: tuple) -> tuple[tuple, gradients.GradientSums]:
            return worker, gradients.zeros(shared.params)

        def add(
            shared: types.Shared,
            worker: tuple,
            sums: gradients.GradientSums,
            microbatch: types.Microbatch,
            rng: jax.Array,
        ) -> tuple[tuple, gradients.GradientSums]:
            handed: Handed = shared.given
            place = jnp.argmax(handed.first_ids == microbatch.example_ids[0])
            counts = place == handed.counts
            own = jax.tree.map(lambda x: x[place], handed.cotangents)
            found, pull = jax.vjp(lambda params: embedded(params, microbatch, rng), shared.params)
            totals, treedef = jax.tree.flatten(sums.grad_sum)
            (grads,) = pull(own)
            leaves = jax.tree.leaves(grads)
            finite = trees.all_finite((found, leaves))
            totals = [a + b.astype(a.dtype) for a, b in zip(totals, leaves, strict=True)]
            for index, direct in zip(self._uses, handed.direct, strict=True):
                totals[index] += jnp.where(counts, direct, 0).astype(totals[index].dtype)
            loss = jnp.where(finite, jnp.where(counts, handed.value, 0), jnp.nan)
            return worker, gradients.GradientSums(
                jax.tree.unflatten(treedef, totals),
                sums.loss_sum + loss.astype(sums.loss_sum.dtype),
                sums.weight_sum + counts.astype(sums.weight_sum.dtype),
            )

        return rules.LocalRule(
            begin,
            add,
            gradients.finish,
            checked=lambda worker, sums: sums.loss_sum,
            reads=rules.Reads(loss_sum=lambda sums: sums.loss_sum),
        )

    def _between(
        self,
        like: types.PyTree,
        used: list[jax.Array],
        gathered: types.PyTree,
        mask: jax.Array,
        named: types.Named,
    ) -> tuple[types.PyTree, list[jax.Array], jax.Array, jax.Array]:
        """The loss and its gradients; `mask` f32[M * B]."""
        leaves, treedef = jax.tree.flatten(like)
        leaves = [jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
        first = jnp.argmax(mask)

        def real(rows: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            """Another example in each place without one: the gradient of a norm at 0 is NaN."""
            rows = rows.reshape(leaf.shape).astype(leaf.dtype)
            return jnp.where(mask.reshape(-1, *[1] * (rows.ndim - 1)) > 0, rows, rows[first][None])

        def value(used: list[jax.Array], embedded: types.PyTree) -> jax.Array:
            whole = dict(enumerate(leaves)) | dict(zip(self._uses, used, strict=True))
            with named_lib.scope(named):
                return self._loss(jax.tree.unflatten(treedef, list(whole.values())), embedded, mask)

        embedded = jax.tree.map(real, gathered, self._like)
        loss, (direct, found) = jax.value_and_grad(value, (0, 1))(used, embedded)

        def of_examples(rows: jax.Array) -> jax.Array:
            is_real = mask.reshape(-1, *[1] * (rows.ndim - 1)) > 0
            return jnp.where(is_real, rows, 0).reshape(self._by_microbatch(rows))

        return jax.tree.map(of_examples, found), direct, loss, first // self._size

    def first_ids(self, example_ids: np.ndarray) -> np.ndarray:
        """i32[M], of a round's microbatches i32[k, B]; -1 where it has fewer."""
        found = np.full(self._num, -1, np.int32)
        found[: len(example_ids)] = example_ids[: self._num, 0]
        return found

    def handed(
        self,
        params: types.PyTree,
        gathered: types.PyTree,
        done: np.ndarray,
        named: types.Named,
        *,
        is_finite: bool,
    ) -> Handed:
        """What the second pass is given.

        Args:
            params: leaves `[W, ...]`.
            gathered: the embeddings, leaves `[W, M, B, ...]`.
            done: i32[k, B], ids of the microbatches of the first pass; below 0 what is no example.
            named: what the loss may ask for, on one device.
            is_finite: whether all of them were; else the second pass is to find what was not.
        """
        mask = np.zeros((self._num, self._size), np.float32)
        mask[: len(done)] = done[: self._num] >= 0
        used = mesh_lib.own_row([jax.tree.leaves(params)[index] for index in self._uses])
        found = self._gradient(used, mesh_lib.own_row(gathered), mask.reshape(-1), named)
        cotangents, direct, value, counts = jax.device_get(found)
        if not is_finite:
            cotangents, direct, value = jax.tree.map(np.zeros_like, (cotangents, direct, value))
        return Handed(self.first_ids(done), cotangents, direct, value, counts)


def _uses(loss: Callable, params: types.PyTree, embedded: types.PyTree) -> list[int]:
    """Which leaves of the parameters the loss itself uses; nothing is computed.

    An eager executor has all of them: the loss is not traced.
    """
    if executor.is_eager():
        return list(range(len(jax.tree.leaves(params))))
    mask = jax.ShapeDtypeStruct((jax.tree.leaves(embedded)[0].shape[0],), jnp.float32)
    program = jax.make_jaxpr(loss)(params, embedded, mask).jaxpr
    seen = {
        variable
        for variables in (program.outvars, *(equation.invars for equation in program.eqns))
        for variable in variables
        if not isinstance(variable, core.Literal)
    }
    return [index for index in range(len(jax.tree.leaves(params))) if program.invars[index] in seen]


def _check_mask(loss: Callable, params: types.PyTree, like: types.PyTree) -> None:
    """Refuses a loss that goes by rows whose mask is 0.

    Raises:
        ValueError: it does.
    """
    size = jax.tree.leaves(like)[0].shape[0]
    if size < 2:
        return
    mask, drawn = (np.arange(size) < size // 2).astype(np.float32), np.random.default_rng(0)
    rows = jax.tree.map(lambda x: drawn.normal(size=x.shape).astype(x.dtype), like)
    others = jax.tree.map(lambda x: np.concatenate([x[: size // 2], x[: size - size // 2]]), rows)
    values = [float(jax.jit(loss)(params, each, mask)) for each in (rows, others)]
    if not np.isclose(values[0], values[1], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ValueError(
            f"batch_loss: loss is {values[0]:.6g}, and {values[1]:.6g} with other rows where mask "
            "is 0; leave those out, as by jnp.where(mask > 0, scores, -jnp.inf)"
        )


def passes_of(
    loss_fn: losses_lib.LossFn,
    params: types.PyTree,
    examples: types.PyTree,
    keys: jax.Array,
    config: config_lib.ExperimentConfig,
    chosen: kinds.Parts,
    rule: rules.LocalRule | None,
) -> tuple[Passes | None, rules.LocalRule | None]:
    """The passes of a round of this loss, and its main rule; None and `rule` of any other loss.

    Raises:
        ValueError: such a loss cannot go with what was chosen.
    """
    if not isinstance(loss_fn, batch_loss.BatchLoss):
        return None, rule
    _refuse(config, chosen, rule)
    passes = Passes(loss_fn, params, examples, keys, num_microbatches=config.budget)
    return passes, passes.second


def _refuse(
    config: config_lib.ExperimentConfig, chosen: kinds.Parts, rule: rules.LocalRule | None
) -> None:
    """Refuses what a loss over the round cannot go with.

    Raises:
        ValueError: it is one of them; with the reason, and what to do.
    """
    why = ""
    if chosen.reducer.gossips:
        why = (
            f"reducer={kinds.name_of('reducer', chosen.reducer)!r}: with gossip each worker "
            "updates from its own gradients at its own parameters, and this loss is of all "
            "workers' examples. Take reducer='all_reduce'"
        )
    elif config.data.sharing != "shared":
        why = (
            f"data.sharing={config.data.sharing!r}: a sum over shards counts each by its weight, "
            "and this loss is no sum over examples. Take data.sharing='shared'"
        )
    elif chosen.ordering.make_observer is not None:
        why = (
            f"ordering.method={kinds.name_of('ordering', chosen.ordering)!r} balances the "
            "gradients of single examples, and of this loss there is none. Take "
            "ordering.method='random_reshuffling'"
        )
    elif config.nonfinite == "skip":
        why = (
            "nonfinite='skip': what is not finite in one microbatch is in the loss of all of them, "
            "so none can be left out. Take nonfinite='stop'"
        )
    elif config.loss_over == "example":
        why = "loss_over='example': it is over all examples of a round. Leave out loss_over="
    elif rule is not None:
        why = "rule: its rounds have two rules of its own, and another was given. Leave out rule="
    if why:
        raise ValueError(f"batch_loss: {why}")
