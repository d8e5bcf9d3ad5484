"""The last step of a synchronisation: each worker's update from what was reduced."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetjax import mesh as mesh_lib
from hetjax import trees, types
from hetjax.losses import named as named_lib
from hetjax.losses import stateful
from hetjax.rounds import judged
from hetjax.rounds.reduce import Form, How, Reduced

_AXIS = mesh_lib.WORKER_AXIS


class Outcome(NamedTuple):
    """What came of a round before its update."""

    reduced: Reduced
    kept: types.Kept  # the new memory of the order's observer, and what the local rule keeps
    metrics: types.SyncMetrics  # of all workers
    is_empty: jax.Array  # bool[]: no worker has anything to update from
    active: types.Exchanges = ()  # the exchanges, bool[M], of a reducer that gossips


def update(
    how: How, form: Form, state: types.TrainState, outcome: Outcome
) -> tuple[types.TrainState, types.UpdateSize]:
    """The state after the round, and how far the update went.

    A round whose divisor is 0 or less leaves everything as it was, and so may one that is not
    finite.

    Args:
        how: the optimiser, and the mixing.
        form: collective or array; leaves of all but metrics and exchanges are this form's.
        state: before the round.
        outcome: of the round.
    """
    reduced, kept, metrics, is_empty, active = outcome
    mixing = how.reducer.mixing
    memories = kept.memory, state.memory  # of which one row may stand for all workers
    kept, state = kept._replace(memory=()), state._replace(memory=())

    def mix(params: types.PyTree, model_state: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
        with jax.named_scope("mix"):
            return form.mix((params, model_state), active)

    with jax.named_scope("update"):
        first = mixing is not None and mixing.before_update
        base = state.params, state.model_state
        base = mix(*base) if first else base
        new = form.each(functools.partial(_update_worker, how, metrics))(state, base, reduced, kept)
        updated = new.params
        if mixing is not None and not first:
            params, model_state = mix(new.params, new.model_state)
            new = new._replace(params=params, model_state=model_state)
        is_odd, left_out = jnp.any(metrics.nonfinite_microbatch >= 0), ()
        if how.nonfinite == "skip_update":
            left_out = is_odd = is_odd | ~form.each(_is_finite, (0, 0), None)(reduced, state.params)
        changes = ~(is_empty | (is_odd if how.nonfinite != "skip" else False))
        final = trees.select(changes, new, state)
        final = final._replace(memory=trees.select(changes, *memories))
        if how.ema:
            point = form.each(judged.row)(final.params, final.opt_state)
            model = jax.lax.optimization_barrier(types.Model(point, final.model_state))
            average = jax.tree.map(functools.partial(_averaged, how.ema), state.average, model)
            final = final._replace(average=trees.select(changes, average, state.average))
        if how.values.update is not None:
            goes_on = ~is_odd & ~is_empty if how.nonfinite == "stop" else is_odd | ~is_empty
            after = functools.partial(_values_after, how, metrics, ~is_odd)
            progress = final.progress_rounds, final.progress_rest
            values = form.each(after)(state.values, final.params, *progress)
            final = final._replace(values=trees.select(goes_on, values, state.values))
        if mixing is None:  # read where they lie: nothing more is written
            updated = final.params
        own = functools.partial(_step, gossips=mixing is not None, left_out=left_out)
        return final, form.each(own)(base[0], updated, reduced, new.opt_state, state.values)


def mean(
    how: How, form: Form, before: types.Kept, outcome: Outcome
) -> tuple[types.Kept, types.PyTree, types.PyTree]:
    """`(kept, mean contribution, own sums)` of a round without update; arguments as of `update`."""
    reduced, kept, metrics, is_empty, active = outcome
    with jax.named_scope("mean"):
        found, own = form.each(_mean)(reduced)
        model_state = form.each(_changed)(before.model_state, reduced)
        if how.reducer.mixing is not None:
            with jax.named_scope("mix"):
                found, model_state = form.mix((found, model_state), active)
        is_odd = jnp.any(metrics.nonfinite_microbatch >= 0)
        blocked = is_empty | (is_odd if how.nonfinite != "skip" else False)
        progress = before.progress_rounds
        kept = kept._replace(model_state=model_state, values=before.values)
        kept = kept._replace(progress_rounds=progress)
        return trees.select(~blocked, kept, before), found, own


def _changed(model_state: types.PyTree, reduced: Reduced) -> types.PyTree:
    return stateful.changed(model_state, reduced.state_change, reduced.num_examples)


def _is_finite(reduced: Reduced, params: types.PyTree) -> jax.Array:
    """Whether the gradients of all workers are, in the types of the parameters."""
    finite = trees.all_finite(_gradients(reduced, params))
    return jax.lax.pmin(finite.astype(jnp.int32), _AXIS) > 0


def _gradients(reduced: Reduced, params: types.PyTree) -> types.PyTree:
    scale = _scale(reduced)
    return jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), reduced.sums, params)


def _values_after(
    how: How,
    metrics: types.SyncMetrics,
    finite: jax.Array,
    values: types.PyTree,
    params: types.PyTree,
    *progress: jax.Array,
) -> types.PyTree:
    """What losses are given as `values` in the next round, of one worker."""
    sums = {name: total / weight for name, (total, weight) in dict(metrics.metric_sums).items()}
    told = {"loss": trees.over(metrics.loss_sum, metrics.weight_sum), "finite": finite, **sums}
    params = jax.lax.optimization_barrier(params)
    epochs = named_lib.progress_of(how.rounds_an_epoch, *progress)
    after = how.values.update(values, params, epochs, told)
    stateful.check_like(after, values, "values: the update returned another form")
    return after


def _scale(reduced: Reduced) -> jax.Array:
    # XLA computes a product twice, not a quotient.
    return 1 / jnp.where(reduced.weight > 0, reduced.weight, 1)


def _mean(reduced: Reduced) -> types.PyTree:
    """`(mean contribution, the worker's own sums over the same weight)`."""
    scale = _scale(reduced)
    return jax.tree.map(lambda s: s * scale.astype(s.dtype), (reduced.sums, reduced.own))


def _update_worker(
    how: How,
    metrics: types.SyncMetrics,
    state: types.TrainState,
    base: tuple[types.PyTree, types.PyTree],
    reduced: Reduced,
    kept: types.Kept,
) -> types.TrainState:
    """One worker's optimiser update, leaves without worker axis.

    The update, computed at the worker's parameters, is added to those of `base`, and the change of
    the model's state to its state. With a reducer that gossips a worker that did nothing has no
    update, and its optimiser's state stays.
    """
    assert how.optimizer is not None
    base_params, base_state = base
    grads = _gradients(reduced, state.params)
    given, progress = (grads, state.opt_state, state.params), state.progress_rounds
    loss = trees.over(metrics.loss_sum, metrics.weight_sum)
    did = jnp.maximum(jnp.sum(metrics.microbatches_done > 0), 1)
    told = {
        "value": loss,
        "progress": progress,
        "mean_steps": (jnp.sum(metrics.microbatches_done) / did).astype(loss.dtype),
        "mean_examples": (jnp.sum(metrics.example_count) / did).astype(loss.dtype),
    }
    grads, extra = how.optimizer.arguments(*given, **told)
    updates, opt_state = how.optimizer.plain.update(grads, *given[1:], **extra)
    params = optax.apply_updates(base_params, updates)
    if how.reducer.mixing is not None:
        before = base_params, state.opt_state
        params, opt_state = trees.select(reduced.weight > 0, (params, opt_state), before)
    examples = jnp.sum(metrics.example_count).astype(state.progress_rounds.dtype)
    step = examples / how.nominal_examples - state.progress_rest  # or 2**24 + 1 stays 2**24
    progress = state.progress_rounds + step
    rest = (progress - state.progress_rounds) - step
    more = _changed(base_state, reduced), state.average, rest, state.values
    return types.TrainState(params, kept.memory, opt_state, kept.worker, progress, *more)


def _averaged(decay: float, average: jax.Array, now: jax.Array) -> jax.Array:
    """With the value of this round; what is no floating point number is as it is now."""
    if not jnp.issubdtype(now.dtype, jnp.floating):
        return now
    return average + (1 - decay) * (now.astype(average.dtype) - average)


def _step(
    base: types.PyTree,
    updated: types.PyTree,
    reduced: Reduced,
    opt_state: types.PyTree,
    values: types.PyTree,
    *,
    gossips: bool,
    left_out: Any,
) -> types.UpdateSize:
    """How far one worker's update went; with gossip the mean over the workers that updated."""
    updated = jax.lax.optimization_barrier(updated)  # or the update is computed a second time
    grad_norm = _scale(reduced) * _norm(reduced.sums)
    moved = jax.tree.map(lambda a, b: trees.wide(a) - trees.wide(b), updated, base)
    numbers = {
        stateful.path_of(path) or "value": leaf.astype(jnp.float32)
        for path, leaf in jax.tree.leaves_with_path(values)
        if not leaf.ndim
    }
    step = types.UpdateSize(grad_norm, _norm(moved), _learning_rate(opt_state), numbers)
    if gossips:
        did = reduced.weight > 0
        num = jax.lax.psum(did.astype(jnp.float32), _AXIS)
        total = jax.lax.psum(trees.select(did, step, jax.tree.map(jnp.zeros_like, step)), _AXIS)
        step = jax.tree.map(lambda x: x / jnp.maximum(num, 1).astype(x.dtype), total)
    return step._replace(left_out=left_out)


def _norm(tree: types.PyTree) -> jax.Array:
    """Of all numbers of the leaves, in float32 or wider.

    Leaf by leaf: where small ones are joined first, XLA rounds what uses them in another way.
    """
    leaves = [trees.wide(leaf) for leaf in jax.tree.leaves(tree)]
    dtype = jnp.finfo(trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))).dtype
    squares = [jnp.sum(jnp.square(jnp.abs(leaf)), dtype=dtype) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), dtype)))


def _learning_rate(opt_state: types.PyTree) -> jax.Array:
    """The one that the state holds, as of `scale_by_progress` or `optax.inject_hyperparams`."""
    named = [value for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    rates = [value for value in named if isinstance(value, jax.Array) and not value.ndim]
    if len(rates) != 1:  # none, or one for each group of parameters
        return jnp.full((), jnp.nan, jnp.float32)
    (rate,) = rates
    return trees.wide(rate)
