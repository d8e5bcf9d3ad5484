"""The local rule whose workers take optimiser steps of their own, as many as their quotas say."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import extra_arguments, parts, trees, types
from hetjax.local import rules
from hetjax.losses import loss as losses_lib
from hetjax.losses import stateful
from hetjax.parts import options

WEIGHTS = ("loss", "uniform", "fednova")
_TRIED = (2.0, 8.0, 8.0)  # steps, examples and weight of the losses, with which weights are tried


class LocalSums(NamedTuple):
    """What a worker has after some steps of a round; numbers are float32 or wider."""

    params: types.PyTree  # its own
    loss_sum: jax.Array  # f[]: of weight * loss, each at the parameters of its step
    loss_weight: jax.Array  # f[]
    steps: jax.Array  # f[]
    examples: jax.Array  # f[]
    progress: types.PyTree  # f[]: of the run, when the round began
    metric_sums: types.PyTree = ()
    states: types.PyTree = ()  # of the model: when the round began, and after these steps
    probe: types.PyTree = ()  # of `fednova`: a number that the optimiser moves, and its state


def _inner(value: Any) -> Any:
    """An optax optimiser, or what is written down of one."""
    value = {"name": value} if isinstance(value, str) else value
    made_inner(value)
    return value


def made_inner(value: Any) -> optax.GradientTransformation:
    """The inner optimiser, of itself or of its name and arguments.

    Raises:
        options.Refused: optax has none of the name, or it takes other arguments.
    """
    if isinstance(value, optax.GradientTransformation):
        return value
    if not isinstance(value, Mapping):
        raise options.Refused
    arguments = dict(value)
    make = getattr(optax, name := str(arguments.pop("name", None)), None)
    try:
        made = make(**arguments) if callable(make) else None
    except TypeError as error:
        raise options.Refused(str(error)) from None
    if not isinstance(made, optax.GradientTransformation):
        raise options.Refused(f"optax has no optimiser {name!r}")
    return made


def _weights(value: Any) -> Any:
    """One of `WEIGHTS`, or a function that is tried."""
    if not callable(value) and value not in WEIGHTS:
        raise options.Refused
    if callable(value):
        try:
            found = np.asarray(value(*(jnp.asarray(x, jnp.float32) for x in _TRIED)))
        except Exception as error:
            raise options.Refused(f"of {_TRIED} it raised {error!r}") from error
        if found.shape or not (np.isfinite(found) and found > 0):
            raise options.Refused(f"of {_TRIED} it gave {found}")
    return value


_INNER = options.Rule("an optax optimiser, or {'name': of optax, and its arguments}", _inner)
_OF_WEIGHTS = options.Rule(
    f"one of {', '.join(WEIGHTS)}, or a function of (steps, examples, loss_weight), > 0", _weights
)


@parts.factory
def local_steps(
    inner: Annotated[Any, parts.option(_INNER, says="makes a step of each microbatch")],
    weights: Annotated[Any, parts.option(_OF_WEIGHTS, says="how much each worker counts")] = "loss",
    keep: Annotated[bool, parts.flag(says="inner states go on to the next round")] = True,
) -> rules.LocalRule:
    """A worker takes a step of its own on each microbatch; a round brings the workers together.

    Each worker begins at the round's parameters x and takes as many steps of `inner` as its quota
    says, to y. What the run's optimiser, the outer one, is given for a gradient is the weighted
    mean of `x - y` over the workers. With `optax.sgd(1.0)` it is the mean of the workers (local
    SGD), with `optax.sgd(0.7, momentum=0.9, nesterov=True)` and AdamW within it is DiLoCo. `budget`
    is the steps of all workers in a round.

    An inner optimiser that takes `progress`, such as `hetjax.scale_by_progress`, is given that of
    the run when the round began, so its schedule goes by the examples of all workers. A schedule
    of optax counts the worker's own steps.

    Args:
        inner: any optax optimiser that updates from one gradient; or its name and arguments, such
            as `{"name": "adamw", "learning_rate": 4e-4}`, which `config.json` keeps.
        weights: how much each worker counts. "loss": as much as the losses that it took weigh
            together, so by examples or tokens, and `data.weighting` is as elsewhere; with one step
            each it is all-reduce. "uniform": all alike. "fednova": all alike, or by the share of
            its private shard, and each difference is divided by a, how far `inner` takes a
            constant gradient of 1 in so many steps; the mean is multiplied by the mean a. Or a
            function `(steps f[], examples f[], loss_weight f[]) -> f[]`, at least 0.
        keep: whether the state of `inner` stays with its worker; else each round begins it anew.

    Raises:
        ValueError: an option is wrong; `inner` needs more than a gradient; or with "fednova" it is
            not linear in the gradients, as those that normalise are not, such as Adam, or it is
            kept and has a state, such as momentum or the count of a schedule.

    Example:
        >>> import optax
        >>> rule = local_steps({"name": "sgd", "learning_rate": 0.1}, weights="uniform")
        >>> rule.traits.weighs_itself
        True

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models",
        2023, arXiv 2311.08105. Wang et al., "Tackling the objective inconsistency problem in
        heterogeneous federated optimization", 2020, arXiv 2007.07481 (FedNova): a plain mean over
        unequal steps converges to a point of other weights.
    """
    optimizer = extra_arguments.with_extra_arguments(made_inner(inner))
    _check_takes_gradients(optimizer)
    if weights == "fednova":
        _check_linear(optimizer, keep=keep)
    traits = rules.Traits(
        keeps_worker=keep,
        weighs_itself=weights != "loss",
        by_share=weights == "fednova",
        own_params=True,
    )
    of_loss = functools.partial(_rule, optimizer, weights, traits)
    return rules.for_a_loss("local_steps", of_loss, traits)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What a worker does by a loss."""

    inner: extra_arguments.Asked
    weights: Any
    loss_fn: losses_lib.LossFn
    metrics: tuple[str, ...]
    per_example_rng: bool

    def begin(self, shared: types.Shared, state: Any) -> tuple[Any, LocalSums]:
        kinds = map(jnp.result_type, jax.tree.leaves(shared.params))
        zero: Any = np.zeros((), trees.wider(*kinds, jnp.float32))
        is_probed = self.weights == "fednova"
        return state, LocalSums(
            shared.params,
            *(zero,) * 4,
            progress=zero if isinstance(shared.progress, tuple) else shared.progress,
            metric_sums=dict.fromkeys(self.metrics, (zero, zero)),
            states=(shared.model_state,) * 2,
            probe=(zero, self.inner.init(jnp.asarray(zero))) if is_probed else (),
        )

    def add(
        self,
        shared: types.Shared,
        state: Any,
        sums: LocalSums,
        microbatch: types.Microbatch,
        rng: jax.Array,
    ) -> tuple[Any, LocalSums]:
        found, grads = self._gradient(sums, microbatch, rng)
        told = {"value": trees.over(*found[:2]), "progress": sums.progress}
        updates, new_state = self.inner.update(grads, state, sums.params, **told)
        params, probe = optax.apply_updates(sums.params, updates), sums.probe
        if probe:
            at, of_probe = probe
            moved, of_probe = self.inner.update(jnp.ones_like(at), of_probe, at, **told)
            probe = optax.apply_updates(at, moved), of_probe
        examples = jnp.sum(microbatch.example_mask > 0)
        loss_sum, weight, metrics, change = found
        terms = (loss_sum, weight, jnp.ones(()), examples), metrics
        before = sums[1:5], sums.metric_sums
        counts, measured = jax.tree.map(lambda a, b: a + b.astype(a.dtype), before, terms)
        states = sums.states[0], stateful.changed(sums.states[1], change, examples)
        after = LocalSums._make((params, *counts, sums.progress, measured, states, probe))
        # Without any weight there is no gradient, and no step: padding, say.
        return trees.select(weight > 0, (new_state, after), (state, sums))

    def _gradient(
        self, sums: LocalSums, microbatch: types.Microbatch, rng: jax.Array
    ) -> tuple[Any, types.PyTree]:
        """`((sum of the losses, of their weights, metrics, change of the state), gradient)`."""
        losses = losses_lib.masked(
            self.loss_fn,
            microbatch,
            rng,
            sums.states[1],
            per_example_rng=self.per_example_rng,
            metrics=self.metrics,
        )

        def mean(params: types.PyTree) -> tuple[jax.Array, Any]:
            values, weights = losses(params)
            total, told = jnp.sum(values), weights.sum()
            if not isinstance(told, losses_lib.Weights):
                told = losses_lib.Weights(told, {})
            return trees.over(total, told.weights), (total, *told)

        (_, found), grads = jax.value_and_grad(mean, has_aux=True)(sums.params)
        return found, grads

    def finish(
        self, shared: types.Shared, state: Any, sums: LocalSums
    ) -> tuple[Any, types.PyTree, jax.Array]:
        weight = sums.loss_weight
        if self.weights != "loss":
            weight = jnp.ones_like(weight)
            if callable(self.weights):
                told = self.weights(sums.steps, sums.examples, sums.loss_weight)
                weight = told.astype(weight.dtype)
            weight = jnp.where(sums.steps > 0, weight, 0)
        times = trees.over(weight, how_far(sums)) if sums.probe else weight

        def moved(before: jax.Array, after: jax.Array) -> jax.Array:
            wide = trees.wider(before.dtype, jnp.float32)
            return (before.astype(wide) - after.astype(wide)) * times.astype(wide)

        return state, jax.tree.map(moved, shared.params, sums.params), weight

    def state_change(self, sums: LocalSums) -> types.PyTree:
        before, after = sums.states
        if not jax.tree.leaves(before):
            return ()
        assert isinstance(self.loss_fn, stateful.StatefulLoss)
        return self.loss_fn.change(before, after, sums.examples)


def how_far(sums: LocalSums) -> jax.Array:
    """Has the optimiser taken a constant gradient of 1: `a` of FedNova."""
    return -sums.probe[0]


def _rule(
    inner: extra_arguments.Asked,
    weights: Any,
    traits: rules.Traits,
    loss_fn: losses_lib.LossFn,
    *,
    per_example_rng: bool = False,
    metrics: Sequence[str] = (),
) -> rules.LocalRule:
    names = tuple(sorted(metrics))
    steps = _Steps(inner, weights, loss_fn, names, per_example_rng)
    return rules.LocalRule(
        steps.begin,
        steps.add,
        steps.finish,
        inner.init,
        checked=lambda state, sums: (sums.loss_sum, sums.params, sums.states[1], state),
        traits=traits,
        reads=rules.Reads(
            loss_sum=lambda sums: sums.loss_sum,
            loss_weight=lambda sums: sums.loss_weight,
            scale=how_far if weights == "fednova" else None,
            metrics=names,
            metric_sums=(lambda sums: sums.metric_sums) if names else None,
            state_change=steps.state_change if isinstance(loss_fn, stateful.StatefulLoss) else None,
        ),
    )


def _check_takes_gradients(inner: extra_arguments.Asked) -> None:
    """Refuses an optimiser that needs more than a gradient, as line searches do."""
    params = {"x": jnp.zeros(2)}
    try:
        state = jax.eval_shape(inner.init, params)
        told = dict.fromkeys(("value", "progress"), jax.ShapeDtypeStruct((), jnp.float32))
        jax.eval_shape(inner.update, params, state, params, **told)
    except TypeError as error:
        raise ValueError(
            f"local_steps: inner needs more than a gradient ({error}). L-BFGS and line searches "
            "try several points a step; take one that updates from one gradient"
        ) from error
    except Exception:  # of one that is made for the parameters of a model
        return


def _check_linear(inner: extra_arguments.Asked, *, keep: bool) -> None:
    """Refuses an optimiser of which gradients that are twice as large do not go twice as far; and
    one whose state is kept, since workers are weighed by a fresh one."""

    def far(grad: float) -> np.ndarray:
        at = jnp.zeros(())
        state, told = inner.init(at), {"value": jnp.ones(()), "progress": jnp.zeros(())}
        for _ in range(3):
            moved, state = inner.update(jnp.full_like(at, grad), state, at, **told)
            at = optax.apply_updates(at, moved)
        return np.asarray(at)

    why = "normalises, as Adam does"
    try:
        with jax.numpy_dtype_promotion("standard"):  # Optax needs it
            is_linear = np.allclose(2 * far(1.0), far(2.0), rtol=1e-4, atol=0)
    except Exception as error:
        is_linear, why = False, f"raised {error!r} for one number"
    if not is_linear:
        raise ValueError(
            "local_steps: weights='fednova' needs an inner optimiser that goes twice as far by "
            "gradients that are twice as large, such as SGD with momentum. This one "
            f"{why}; take weights='loss'"
        )
    if keep and jax.tree.leaves(inner.init(jnp.zeros(()))):
        raise ValueError(
            "local_steps: weights='fednova' divides by how far a fresh inner optimiser goes, and "
            "this one has a state (momentum, a schedule's count) that goes on; give keep=False"
        )
