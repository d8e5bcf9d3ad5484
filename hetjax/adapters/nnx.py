"""Models of Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from hetjax.adapters import fits, forwarding

PerExampleFn = Callable[[Any, Any], Any]
LossFn = Callable[[Any, Any, jax.Array], Any]
MetricsFn = Callable[[Any, Any], Any]


def nnx_loss(
    model: nnx.Module, per_example_loss: PerExampleFn, *, wrt: Any = nnx.Param
) -> tuple[LossFn, Any]:
    """Makes the core's loss of a Flax NNX model, in training mode.

    Args:
      model: the model; it is copied, not changed.
      per_example_loss: `(model, batch) -> losses f[B]`, or `(losses, weights)`, or a
        `hetjax.Losses`.
      wrt: a filter of NNX: which variables are trained, such as `nnx.LoRAParam`. The others are
        constants of the compiled program.

    Returns:
      `(loss_fn, params)`: the pure loss, and the initial parameters as nested dicts.

    Raises:
      ValueError: the model has an `nnx.BatchStat`, or no variable that `wrt` chooses, or one of
        the arguments is not what its name says. `loss_fn` raises one, when it is traced, if a call
        of the model changes variables that are neither parameters nor random streams, or if
        `params` are of another model.
    """
    fits.check_model("nnx_loss", model, per_example_loss, nnx.Module)
    fits.check_function("nnx_loss", per_example_loss, "losses f32[B]")
    copy = nnx.clone(model)
    copy.train()
    maker = _Maker("nnx_loss", copy, wrt)
    streams = sorted({str(key.tag) for _, key in nnx.to_flat_state(nnx.state(copy, nnx.RngKey))})

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        def losses(batch: Any, key: jax.Array) -> Any:
            def call(built: Any) -> Any:
                if streams:
                    keys: Any = {name: fits.fold(key, index) for index, name in enumerate(streams)}
                    nnx.reseed(built, policy="match_shape", **keys)
                return per_example_loss(built, batch)

            return maker.call(params, call)

        return fits.by_key(losses, batch, rng) if streams else losses(batch, rng)

    return loss_fn, maker.params


def nnx_metrics(
    model: nnx.Module, per_example_metrics: PerExampleFn, *, wrt: Any = nnx.Param
) -> MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax NNX model, in evaluation mode (no dropout).

    Args:
      model: the model; it is copied, not changed.
      per_example_metrics: `(model, batch) -> {name: f[B]}`, or `(values, weights)` for a name.
      wrt: as for `nnx_loss`.

    Raises:
      ValueError: as `nnx_loss`.
    """
    fits.check_model("nnx_metrics", model, per_example_metrics, nnx.Module)
    fits.check_function("nnx_metrics", per_example_metrics, "{name: f32[B]}")
    copy = nnx.clone(model)
    copy.eval()
    maker = _Maker("nnx_metrics", copy, wrt)
    return lambda params, batch: maker.call(params, lambda built: per_example_metrics(built, batch))


def nnx_model(model: nnx.Module, params: Any, *, wrt: Any = nnx.Param) -> Any:
    """Returns a copy of `model` with `params`, for instance those that training returned.

    Args:
      model: the model.
      params: of the variables that `wrt` chooses; the others are as in `model`.
      wrt: as for `nnx_loss`.

    Raises:
      ValueError: `params` has not the structure or the shapes of the model's parameters.
    """
    fits.check_model("nnx_model", model, None, nnx.Module)
    return _Maker("nnx_model", model, wrt).build(params)


class _Maker:
    """Makes models from parameters, with everything else as in one model.

    Args:
      caller: the adapter, for messages.
      model: the model.
      wrt: which variables are the parameters.
    """

    def __init__(self, caller: str, model: nnx.Module, wrt: Any) -> None:
        stateful = [
            fits.dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
        ]
        if stateful:
            raise ValueError(fits.REFUSAL.format(where=fits.named(stateful)))
        self._caller = caller
        parts: Any = nnx.split(model, wrt, ...)
        self._graph, self._trained, self._rest = parts
        self.params = nnx.to_pure_dict(self._trained)
        if not jax.tree.leaves(self.params):
            others = nnx.to_flat_state(self._rest)
            kinds = sorted({type(variable).__name__ for _, variable in others})
            raise ValueError(
                f"{caller}: wrt={wrt!r} chooses no variable of the model; it has variables of the "
                f"types {', '.join(kinds) or 'none'}"
            )
        # What a call may change: streams are seeded anew; what is sown is read or dropped.
        may = nnx.Any(wrt, nnx.Param, nnx.RngState, nnx.Intermediate)
        self._constant = nnx.Not(may)

    def build(self, params: Any) -> Any:
        """The model with these parameters.

        Raises:
          ValueError: they are of another model.
        """
        if isinstance(params, nnx.State):
            params = nnx.to_pure_dict(params)
        fits.check_params(self._caller, params, self.params)
        # New variables in each call: a merged model changes those that it gets (the counts of its
        # random streams), and those of another trace may not be changed.
        state, constants = jax.tree.map(lambda leaf: leaf, (self._trained, self._rest))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state, constants)

    def call(self, params: Any, function: Callable[[Any], Any]) -> Any:
        """`function(model)`.

        Raises:
          ValueError: the call changed variables that are neither parameters nor random streams.
        """
        built = self.build(params)
        before = nnx.state(built, self._constant)
        leaves, treedef = jax.tree.flatten_with_path(before)
        values = dict(leaves)
        returned = function(built)
        after = dict(jax.tree.leaves_with_path(nnx.state(built, self._constant)))
        if after.keys() == values.keys():
            if all(after[path] is value for path, value in values.items()):
                return returned
            # They are other objects, but `remat` and its like give back all that went in.
            again = self._again(params, function, treedef, list(values))
            is_other = forwarding.changed(again, list(values.values()))
            changed = [path for path, other in zip(values, is_other, strict=True) if other]
        else:
            changed = sorted(after.keys() ^ values.keys(), key=str)
        if changed:
            where = fits.named(map(fits.dotted, changed))
            raise ValueError(fits.CHANGES.format(where=where, hint=""))
        return returned

    def _again(
        self, params: Any, function: Callable[[Any], Any], treedef: Any, paths: list[Any]
    ) -> Callable[[list[Any]], list[Any]]:
        """From the values of the constant variables to those after the call."""

        def again(values: list[Any]) -> list[Any]:
            built = self.build(params)
            nnx.update(built, jax.tree.unflatten(treedef, values))
            function(built)
            after = dict(jax.tree.leaves_with_path(nnx.state(built, self._constant)))
            return [after[path] for path in paths]

        return again
