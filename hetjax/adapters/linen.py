"""Modules of Flax Linen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from flax.core import meta

from hetjax.adapters import fits, forwarding

PerExampleFn = Callable[[Any, Any], Any]
LossFn = Callable[[Any, Any, jax.Array], Any]
MetricsFn = Callable[[Any, Any], Any]
Filter = Callable[[tuple[str, ...], Any], bool]

_SOWN = "intermediates"  # what a call sows there is read or dropped


def linen_loss(
    module: Any,
    variables: Mapping[str, Any],
    per_example_loss: PerExampleFn,
    *,
    streams: Sequence[str] = ("dropout",),
    wrt: Filter | None = None,
) -> tuple[LossFn, Any]:
    """Makes the core's loss of a Flax Linen module.

     Args:
       module: the module.
       variables: what `module.init` returned.
       per_example_loss: `(model, batch) -> losses f[B]`, or `(losses, weights)`, or a
    `module.apply(variables, ...)`. Pass what the module wants
         in training, such as `model(batch["image"], train=True)`.
       streams: names of the random streams that the module uses.
       wrt: `(path, array) -> bool`: which parameters are trained, such as
         `lambda path, _: "lora" in path`; `path` is a tuple of names. The others are constants of
         the compiled program. None: all.

     Returns:
       `(loss_fn, params)`: the pure loss, and the initial parameters that are trained.

     Raises:
       ValueError: there is a collection `batch_stats`, or no parameter that `wrt` chooses, or one
         of the arguments is not what its name says. `loss_fn` raises one, when it is traced, if a
         call of the module changes other collections, or if `params` are of another model.
    """
    fits.check_model("linen_loss", module, per_example_loss, linen.Module)
    fits.check_function("linen_loss", per_example_loss, "losses f32[B]")
    caller = _Caller("linen_loss", module, variables, wrt)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        def losses(batch: Any, key: jax.Array) -> Any:
            rngs = {name: fits.fold(key, index) for index, name in enumerate(streams)}
            return per_example_loss(caller.model(params, rngs=rngs), batch)

        return fits.by_key(losses, batch, rng) if streams else losses(batch, rng)

    return loss_fn, caller.params


def linen_metrics(
    module: Any,
    variables: Mapping[str, Any],
    per_example_metrics: PerExampleFn,
    *,
    wrt: Filter | None = None,
) -> MetricsFn:
    """Makes `(params, batch) -> metrics` of a Flax Linen module, without random streams.

    Args:
      module: the module.
      variables: what `module.init` returned.
      per_example_metrics: `(model, batch) -> {name: f[B]}`, as in `linen_loss`, or `(values,
        weights)` for a name.
      wrt: as for `linen_loss`.

    Raises:
      ValueError: as `linen_loss`.
    """
    fits.check_model("linen_metrics", module, per_example_metrics, linen.Module)
    fits.check_function("linen_metrics", per_example_metrics, "{name: f32[B]}")
    caller = _Caller("linen_metrics", module, variables, wrt)
    return lambda params, batch: per_example_metrics(caller.model(params), batch)


def linen_variables(
    variables: Mapping[str, Any], params: Any, *, wrt: Filter | None = None
) -> dict[str, Any]:
    """Returns `variables` with `params` in their place, for instance those that training returned.

    Args:
      variables: what `module.init` returned.
      params: of those that `wrt` chooses; the others are as in `variables`.
      wrt: as for `linen_loss`.

    Raises:
      ValueError: `params` has not the structure or the shapes of the parameters.

    Example:
      >>> variables = {"params": {"base": {"kernel": 1.0}, "lora": {"kernel": 2.0}}}
      >>> trained = {"lora": {"kernel": 3.0}}
      >>> linen_variables(variables, trained, wrt=lambda path, _: "lora" in path)
      {'params': {'base': {'kernel': 1.0}, 'lora': {'kernel': 3.0}}}
    """
    return _Caller("linen_variables", None, variables, wrt).variables(params)


class _Caller:
    """Calls a module with parameters, and with everything else as in `variables`.

    Args:
      caller: the adapter, for messages.
      module: the module.
      variables: what its `init` returned.
      wrt: which parameters are trained.
    """

    def __init__(
        self, caller: str, module: Any, variables: Mapping[str, Any], wrt: Filter | None
    ) -> None:
        _check_variables(caller, variables)
        self._caller, self._module = caller, module
        self._constants = dict(meta.unbox(variables))
        self._all = self._constants.pop("params")
        self._wrt = wrt
        self.params = self._all if wrt is None else _chosen(self._all, wrt)
        if not jax.tree.leaves(self.params):
            paths = (".".join(path) for path, _ in _leaves(self._all))
            raise ValueError(
                f"{caller}: wrt chooses none of the parameters {fits.named(paths)}; it is called "
                "with the path of each, a tuple of names, and the array"
            )

    def variables(self, params: Any) -> dict[str, Any]:
        """All variables, with these parameters.

        Raises:
          ValueError: they are of another model.
        """
        fits.check_params(self._caller, params, self.params)
        if self._wrt is not None:
            params = _merged(self._all, params)
        return {"params": params, **self._constants}

    def model(self, params: Any, **rngs: Any) -> Callable[..., Any]:
        """A function that is called like the module."""
        variables = self.variables(params)

        def model(*args: Any, **kwargs: Any) -> Any:
            self._check_constant(variables, args, {**rngs, **kwargs})
            return self._module.apply(variables, *args, **rngs, **kwargs)

        return model

    def _check_constant(
        self, variables: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Refuses a call that would change collections, which workers would not bring back.

        Raises:
          ValueError: the call would.
        """
        watched = {name: variables[name] for name in self._constants if name != _SOWN}
        leaves, treedef = jax.tree.flatten_with_path(watched)
        if not leaves:
            return
        paths = [path for path, _ in leaves]
        kept = {k: v for k, v in kwargs.items() if k not in ("mutable", "capture_intermediates")}

        def again(values: list[Any]) -> list[Any]:
            given = {**variables, **jax.tree.unflatten(treedef, values)}
            _, after = self._module.apply(given, *args, mutable=list(watched), **kept)
            found = dict(jax.tree.leaves_with_path(dict(after)))
            if set(found) - set(paths):  # the module has sown one more array
                added.extend(set(found) - set(paths))
            return [found.get(path, 0) for path in paths]

        added: list[Any] = []
        is_other = forwarding.changed(again, [value for _, value in leaves])
        changed = [path for path, other in zip(paths, is_other, strict=True) if other] + added
        if changed:
            where = fits.named(map(fits.dotted, changed))
            hint = (
                "What is sown anew in each call needs no place in variables: leave its collection "
                "out, and read it by model(…, mutable=[…]). "
            )
            raise ValueError(fits.CHANGES.format(where=where, hint=hint))


def _check_variables(caller: str, variables: Any) -> None:
    if not isinstance(variables, Mapping) or "params" not in variables:
        given = (
            f"has {fits.named(map(repr, variables))}"
            if isinstance(variables, Mapping)
            else (f"is of type {type(variables).__name__}")
        )
        raise ValueError(
            f"{caller}: variables {given}; it must be what module.init returned, a dict with "
            "'params' in it. For parameters alone, give {'params': params}"
        )
    if variables.get("batch_stats"):
        where = ", ".join(sorted(variables["batch_stats"]))
        raise ValueError(fits.REFUSAL.format(where=f"batch_stats: {where}"))


def _leaves(params: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(params, Mapping):
        return [(path, params)]
    return [leaf for name, part in params.items() for leaf in _leaves(part, (*path, str(name)))]


def _chosen(params: Any, wrt: Filter, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The nested dict of the parameters that `wrt` chooses, without empty dicts."""
    found = {}
    for name, part in params.items():
        inner = (*path, str(name))
        if isinstance(part, Mapping):
            chosen = _chosen(part, wrt, inner)
            if chosen:
                found[name] = chosen
        elif wrt(inner, part):
            found[name] = part
    return found


def _merged(whole: Any, part: Any) -> dict[str, Any]:
    """`whole` with the leaves of `part` in their place."""
    return {
        name: (
            value
            if name not in part
            else _merged(value, part[name])
            if isinstance(value, Mapping)
            else part[name]
        )
        for name, value in whole.items()
    }
