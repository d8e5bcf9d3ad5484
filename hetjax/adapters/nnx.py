"""Models of Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import errors, nnx

from hetjax import mesh
from hetjax.adapters import fits
from hetjax.losses import forwarding, named

_HINT = "Keep it as a variable, by nnx_loss(…, state=…); if it is trained call nnx.clone(layer)"


def nnx_loss(
    model: nnx.Module,
    per_example_loss: fits.PerExampleFn,
    *,
    wrt: Any = nnx.Param,
    state: Any = nnx.BatchStat,
) -> tuple[fits.LossFn, Any]:
    """Makes the core's loss of a Flax NNX model, in the mode in which the model is.

    Args:
      model: the model; it is copied, not changed. It trains as it is set: after `model.eval()`
        without dropout, and with the statistics of its BatchNorms fixed.
      per_example_loss: `(model, batch) -> losses f[B]`, or `(losses, weights)`, or a
        `hetjax.Losses`. It takes what it names besides: `rngs`, an `nnx.Rngs` of the microbatch, or
        `rng`, a key; `mask f32[B]`, 0 for padding, which a BatchNorm takes; `frozen` and `values`,
        which `fit` is given.
      wrt: a filter of NNX: which variables are trained, such as `nnx.LoRAParam`. The others are
        frozen: they lie on each device once, and are no constants of a program.
      state: a filter of NNX: which variables training may change without gradients.

    Returns:
      `(loss_fn, params)`: the pure loss, and the initial parameters as nested dicts. Of a model
      with variables that `state` chooses, `loss_fn` is a `hetjax.StatefulLoss`: `fit` takes it in
      the same way, and its result has a `model_state` for `nnx_model`.

    Raises:
      ValueError: there is no variable that `wrt` chooses, or one of the arguments is not what its
        name says. `loss_fn` raises one, when it is traced, if a call of the model changes variables
        that are neither `state` nor random streams, trained ones among them, or if `params` are of
        another model.
    """
    fits.check_model("nnx_loss", model, nnx.Module)
    maker = _Maker("nnx_loss", nnx.clone(model), wrt, state)
    streams = sorted({str(key.tag) for _, key in nnx.to_flat_state(nnx.state(model, nnx.RngKey))})

    def call(params: Any, state: Any, keys: dict[str, Any], asked: Callable[[Any], Any]) -> Any:
        def seeded(built: Any) -> Any:
            if keys:
                nnx.reseed(built, policy="match_shape", **keys)
            return asked(built)

        return maker.call(params, seeded, state)

    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Not(nnx.RngState))))
    more: dict[str, Any] = {"streams": streams, "rngs_of": nnx.Rngs, "specs": specs}
    of_model = maker.state, maker.frozen
    return fits.loss_of("nnx_loss", call, *of_model, per_example_loss, **more), maker.params


def nnx_metrics(
    model: nnx.Module,
    per_example_metrics: fits.PerExampleFn,
    *,
    wrt: Any = nnx.Param,
    state: Any = nnx.BatchStat,
) -> fits.MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax NNX model, in evaluation mode (no dropout).

    Of a model with variables that `state` chooses it is `(params, state, batch) -> metrics`.

    Args:
      model: the model; it is copied, not changed.
      per_example_metrics: `(model, batch) -> {name: f[B]}`, or `(values, weights)` for a name. It
        takes what it names besides: `mask`, `frozen`, `values`.
      wrt, state: as for `nnx_loss`.

    Raises:
      ValueError: as `nnx_loss`.
    """
    fits.check_model("nnx_metrics", model, nnx.Module)
    copy = nnx.clone(model)
    copy.eval()
    maker = _Maker("nnx_metrics", copy, wrt, state)
    function = named.giving(per_example_metrics, 2)

    def metrics_of(params: Any, state: Any, batch: Any) -> Any:
        return maker.call(params, lambda built: function(built, batch), state)[0]

    return fits.metrics_of(metrics_of, maker.state, maker.frozen, function)


@jax.transfer_guard("allow")
def nnx_model(
    model: nnx.Module,
    params: Any,
    model_state: Any = None,
    *,
    wrt: Any = nnx.Param,
    state: Any = nnx.BatchStat,
) -> Any:
    """Returns a copy of `model` with `params`, for instance those that training returned.

    Args:
      model: the model.
      params: of the variables that `wrt` chooses; the others are as in `model`. Of
        `optax.LookaheadParams` it takes the slow ones.
      model_state: of those that `state` chooses, such as a result's `model_state`; None: as in
        `model`.
      wrt, state: as for `nnx_loss`.

    Raises:
      ValueError: `params` has not the structure or the shapes of the model's parameters, or
        `model_state` not those of its state.
    """
    fits.check_model("nnx_model", model, nnx.Module)
    maker = _Maker("nnx_model", model, wrt, state)
    given = maker.state if model_state is None or model_state == () else model_state
    params = params.slow if isinstance(params, optax.LookaheadParams) else params
    return maker.build(params, given)


class _Maker:
    """Makes models from parameters, with everything else as in one model.

    Args:
      caller: the adapter, for messages.
      model: the model.
      wrt: which variables are the parameters.
      state: which variables training may change beside them.
    """

    def __init__(self, caller: str, model: nnx.Module, wrt: Any, state: Any) -> None:
        self._caller = caller
        is_frozen = nnx.All(nnx.Not(nnx.RngState), _is_array)
        parts: Any = mesh.auto(nnx.split(model, wrt, state, is_frozen, ...))
        self._graph, self._trained, self._state, self._frozen, self._rest = parts
        self.frozen = named.OfModel(nnx.to_pure_dict(self._frozen), object())
        self.params = nnx.to_pure_dict(self._trained)
        self.state = nnx.to_pure_dict(self._state)
        if not jax.tree.leaves(self.params):
            raise ValueError(f"{caller}: wrt={wrt!r} chooses no variable of the model")
        # What a call may change: streams are seeded anew; what is sown is read or dropped.
        self._changes = nnx.All(state, nnx.Not(wrt), bool(jax.tree.leaves(self.state)))
        self._constant = nnx.Not(nnx.Any(self._changes, nnx.RngState, nnx.Intermediate))
        self._handed_on: set[Any] = set()  # paths of those that a trace has found unchanged

    def build(self, params: Any, model_state: Any) -> Any:
        """The model with these parameters and this state.

        Raises:
          ValueError: they are of another model.
        """
        # New variables in each call: a merged model changes those that it gets (the counts of its
        # random streams), and those of another trace may not be changed.
        parts = self._trained, self._state, self._frozen, self._rest
        variables = jax.tree.map(lambda leaf: leaf, parts)
        nnx.replace_by_pure_dict(variables[2], named.of_model(self.frozen))
        for name, of_name, given, own in (
            ("params", variables[0], params, self.params),
            ("model_state", variables[1], model_state, self.state),
        ):
            plain = nnx.to_pure_dict(given) if isinstance(given, nnx.State) else given
            fits.check_params(self._caller, plain, own, name)
            # Arrays of JAX: a model that runs eagerly would write into NumPy's own.
            nnx.replace_by_pure_dict(of_name, jax.tree.map(jnp.asarray, plain))
        return nnx.merge(self._graph, *variables)

    def call(self, params: Any, function: Callable, model_state: Any) -> tuple[Any, Any]:
        """`(function(model), the model's state afterwards)`.

        Raises:
          ValueError: the call changed variables that are neither state nor random streams, or
            numbers in attributes, otherwise each time.
        """

        def again(before: Any) -> Any:
            built = self.build(params, model_state)
            nnx.update(built, before)
            function(built)
            if (once := _attributes(built)) != attributes:  # each call may set the same
                function(built)
                changed.extend(path for path, _ in _attributes(built).items() - once.items())
            return jax.tree.leaves(nnx.state(built, self._constant))

        built = self.build(params, model_state)
        before, attributes = nnx.state(built, self._constant), _attributes(built)
        values = dict(jax.tree.leaves_with_path(before))
        try:
            found = function(built)
        except errors.TraceContextError as error:
            hint = "For random numbers take an argument: def loss(model, batch, rngs)"
            raise ValueError(f"{self._caller}: {error}. {hint}") from error
        after = dict(jax.tree.leaves_with_path(nnx.state(built, self._constant)))
        changed = sorted(after.keys() ^ values.keys(), key=str)
        others = {path for path, value in values.items() if after.get(path) is not value}
        if not changed and (_attributes(built) != attributes or not others <= self._handed_on):
            # They are other objects, but `remat` and its like give back all that went in.
            is_other = forwarding.changed(again, before)
            changed += [path for path, other in zip(values, is_other, strict=True) if other]
        if changed:
            where = fits.named(map(fits.dotted, changed))
            raise ValueError(fits.CHANGES.format(where=where, hint=_HINT))
        self._handed_on |= others
        return found, nnx.to_pure_dict(nnx.state(built, self._changes))


def _is_array(path: Any, variable: Any) -> bool:
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
    return hasattr(value, "dtype")


def _attributes(model: Any) -> dict[Any, str]:
    """Numbers and texts that a model has as attributes, by path."""
    return {
        tuple(map(jax.tree_util.DictKey, (*path, name))): repr(value)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | None)
    }
