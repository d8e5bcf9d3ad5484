"""Modules of Flax Linen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen, traverse_util
from flax.core import meta

from hetjax import mesh
from hetjax.adapters import fits
from hetjax.losses import forwarding, named

Filter = Callable[[tuple[str, ...], Any], bool]

_SOWN = "intermediates"  # what a call sows there is read or dropped


def linen_loss(
    module: Any,
    variables: Mapping[str, Any],
    per_example_loss: fits.PerExampleFn,
    *,
    streams: Sequence[str] = ("dropout",),
    wrt: Filter | None = None,
    mutable: Sequence[str] = ("batch_stats",),
) -> tuple[fits.LossFn, Any]:
    """Makes the core's loss of a Flax Linen module.

    Args:
      module: the module.
      variables: what `module.init` returned.
      per_example_loss: `(model, batch) -> losses f[B]`, or `(losses, weights)`, or a
        `hetjax.Losses`; `model(…)` is called as `module.apply(variables, …)`. Pass what the module
        wants in training, such as `model(batch["image"], train=True)`. It takes what it names
        besides: `rng`, a key of the microbatch; `rngs`, one for each of `streams`; `mask f32[B]`, 0
        for padding, which a BatchNorm takes; `frozen` and `values`, which `fit` is given.
      streams: names of the random streams that the module uses.
      wrt: `(path, array) -> bool`: which parameters are trained, such as
        `lambda path, _: "lora" in path`; `path` is a tuple of names. The others are frozen: they
        lie on each device once, and are no constants of a program. None: all.
      mutable: collections that training may change without gradients. Where `variables` has none
        of them, nothing may change.

    Returns:
      `(loss_fn, params)`: the pure loss, and the initial parameters that are trained. Of a module
      with such collections `loss_fn` is a `hetjax.StatefulLoss`: `fit` takes it in the same way,
      and its result has a `model_state` for `linen_variables`.

    Raises:
      ValueError: there is no parameter that `wrt` chooses, or one of the arguments is not what its
        name says. `loss_fn` raises one, when it is traced, if a call of the module changes other
        collections, or if `params` are of another model.
    """
    fits.check_model("linen_loss", module, linen.Module)
    caller = _Caller("linen_loss", module, mesh.auto(variables), wrt, mutable)
    if "_overwrite_with_gradient" in variables:
        raise ValueError("linen_loss: gradients overwrite Fp8 scales; give dtype=jnp.bfloat16")

    def call(params: Any, state: Any, keys: dict[str, Any], asked: Callable[[Any], Any]) -> Any:
        model = caller.model(params, state, rngs=keys)
        return asked(model), model.state

    of_model = caller.state, caller.frozen
    specs = linen.get_partition_spec(variables)
    more: dict[str, Any] = {"streams": streams, "specs": {**specs, **specs["params"]}}
    return fits.loss_of("linen_loss", call, *of_model, per_example_loss, **more), caller.params


def linen_metrics(
    module: Any,
    variables: Mapping[str, Any],
    per_example_metrics: fits.PerExampleFn,
    *,
    wrt: Filter | None = None,
    mutable: Sequence[str] = ("batch_stats",),
) -> fits.MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax Linen module, without random streams.

    Of a module with collections that are `mutable` it is `(params, state, batch) -> metrics`.

    Args:
      module: the module.
      variables: what `module.init` returned.
      per_example_metrics: `(model, batch) -> {name: f[B]}`, as in `linen_loss`, or `(values,
        weights)` for a name. It takes what it names besides: `mask`, `frozen`, `values`.
      wrt, mutable: as for `linen_loss`.

    Raises:
      ValueError: as `linen_loss`.
    """
    fits.check_model("linen_metrics", module, linen.Module)
    caller = _Caller("linen_metrics", module, variables, wrt, mutable)

    function = named.giving(per_example_metrics, 2)

    def metrics_of(params: Any, state: Any, batch: Any) -> Any:
        return function(caller.model(params, state), batch)

    return fits.metrics_of(metrics_of, caller.state, caller.frozen, function)


def linen_variables(
    variables: Mapping[str, Any], params: Any, model_state: Any = None, *, wrt: Filter | None = None
) -> dict[str, Any]:
    """Returns `variables` with `params` in their place, for instance those that training returned.

    Args:
      variables: what `module.init` returned.
      params: of those that `wrt` chooses; the others are as in `variables`.
      model_state: collections by name, such as a result's `model_state`; None: as in `variables`.
      wrt: as for `linen_loss`.

    Raises:
      ValueError: `params` has not the structure or the shapes of the parameters.

    Example:
      >>> variables = {"params": {"base": {"kernel": 1.0}, "lora": {"kernel": 2.0}}}
      >>> trained = {"lora": {"kernel": 3.0}}
      >>> linen_variables(variables, trained, wrt=lambda path, _: "lora" in path)
      {'params': {'base': {'kernel': 1.0}, 'lora': {'kernel': 3.0}}}
    """
    caller = _Caller("linen_variables", None, variables, wrt, tuple(model_state or ()))
    return caller.variables(params, model_state or {})


class _Caller:
    """Calls a module with parameters, and with everything else as in `variables`.

    Args:
      caller: the adapter, for messages.
      module: the module.
      variables: what its `init` returned.
      wrt: which parameters are trained.
      mutable: collections that training may change beside them.
    """

    def __init__(
        self,
        caller: str,
        module: Any,
        variables: Mapping[str, Any],
        wrt: Filter | None,
        mutable: Sequence[str],
    ) -> None:
        if "params" not in variables:
            raise ValueError(f"{caller}: variables has no 'params'; give what module.init returned")
        if "params" in mutable:
            raise ValueError(f"{caller}: mutable names 'params', which the optimiser changes")
        self._caller, self._module = caller, module
        self._constants = dict(meta.unbox(variables))
        self._all = self._constants.pop("params")
        kept = [name for name in mutable if jax.tree.leaves(self._constants.get(name))]
        self.state = {name: self._constants.pop(name) for name in kept}
        self._wrt = wrt
        flat = traverse_util.flatten_dict(self._all)
        if wrt is not None:
            flat = {path: leaf for path, leaf in flat.items() if wrt(path, leaf)}
        self.params = self._all if wrt is None else traverse_util.unflatten_dict(flat)
        whole = traverse_util.flatten_dict(self._all, keep_empty_nodes=True)
        rest = {path: leaf for path, leaf in whole.items() if path not in flat}
        constants = {**self._constants, "params": traverse_util.unflatten_dict(rest)}
        self.frozen = named.OfModel(constants, object())
        if not jax.tree.leaves(self.params):
            paths = map(".".join, traverse_util.flatten_dict(self._all))
            raise ValueError(f"{caller}: wrt chooses none of the parameters {fits.named(paths)}")

    def variables(self, params: Any, state: Any) -> dict[str, Any]:
        """All variables, with these parameters and this state.

        Raises:
          ValueError: they are of another model.
        """
        fits.check_params(self._caller, params, self.params)
        fits.check_params(self._caller, state, self.state, "model_state")
        constants = dict(named.of_model(self.frozen))
        rest = constants.pop("params")
        if self._wrt is not None:
            whole = traverse_util.flatten_dict(rest, keep_empty_nodes=True)
            params = traverse_util.unflatten_dict(whole | traverse_util.flatten_dict(params))
        return {"params": params, **state, **constants}

    def model(self, params: Any, state: Any, **rngs: Any) -> _Model:
        """What is called like the module."""
        return _Model(self, self.variables(params, state), rngs)

    def apply(
        self, variables: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """`(what the module returns, its state afterwards)`.

        Raises:
          ValueError: the call changes collections that are neither.
        """
        self._check_constant(variables, args, kwargs)
        if not self.state:
            return self._module.apply(variables, *args, **kwargs), {}
        asked = kwargs.pop("mutable", False)
        wanted = [asked] if isinstance(asked, str) else list(asked or ())
        both = [*self.state, *(name for name in wanted if name not in self.state)]
        returned, after = self._module.apply(variables, *args, mutable=both, **kwargs)
        state = {name: after.get(name, variables[name]) for name in self.state}
        if asked is not False:  # as the caller's own apply would give it back
            returned = returned, {name: after[name] for name in wanted if name in after}
        return returned, state

    def _check_constant(self, variables: dict[str, Any], args: tuple, kwargs: dict) -> None:
        """Refuses a call that would change collections, which workers would not bring back.

        Raises:
          ValueError: the call would.
        """
        watched = {name: variables[name] for name in self._constants if name != _SOWN}
        if not (paths := [path for path, _ in jax.tree.leaves_with_path(watched)]):
            return
        kept = {k: v for k, v in kwargs.items() if k not in ("mutable", "capture_intermediates")}

        def again(watched: dict[str, Any]) -> list[Any]:
            given, may = {**variables, **watched}, [*watched, *self.state]
            _, after = self._module.apply(given, *args, mutable=may, **kept)
            of_watched = {name: after[name] for name in watched if name in after}
            found = dict(jax.tree.leaves_with_path(of_watched))
            added.extend(set(found) - set(paths))  # the module has sown one more array
            return [found.get(path, 0) for path in paths]

        added: list[Any] = []
        is_other = forwarding.changed(again, watched)
        changed = [path for path, other in zip(paths, is_other, strict=True) if other] + added
        if changed:
            where = fits.named(map(fits.dotted, changed))
            hint = (
                "To keep collections, name them: linen_loss(…, mutable=('batch_stats', 'yours')). "
                "Leave one that is sown out of variables, and read it by model(…, mutable=[…])"
            )
            raise ValueError(fits.CHANGES.format(where=where, hint=hint))


class _Model:
    """Is called like the module, and keeps what calls change of its state.

    Attributes:
      state: collections by name, after the last call.
    """

    def __init__(self, caller: _Caller, variables: dict[str, Any], rngs: dict[str, Any]) -> None:
        self._caller, self._variables, self._rngs = caller, variables, rngs
        self.state = {name: variables[name] for name in caller.state}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        variables = {**self._variables, **self.state}
        returned, self.state = self._caller.apply(variables, args, {**self._rngs, **kwargs})
        return returned
