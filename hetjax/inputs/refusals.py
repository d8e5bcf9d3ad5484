"""Is what a user gave a loss, parameters, an optimiser? First mistakes, with what to write instead.

Nothing is computed: a function is looked at, or called with shapes alone.
"""

import functools
import inspect
import re
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import extra_arguments, parts, trees
from hetjax.checkpoints import leaves
from hetjax.comm import runtime
from hetjax.config import groups, kinds

_LOSS = (
    "it must be loss_fn(params, examples, rng) -> losses f32[B], one number an example, or "
    "(losses, weights)"
)
_OF_FLAX = (
    "Of a Flax NNX model and loss(model, batch): loss_fn, params = hetjax.nnx_loss(model, loss). "
    "Of a Flax Linen module: loss_fn, params = hetjax.linen_loss(module, variables, loss)"
)

_ROUND_HAS = "A round has one gradient, the parameters, value (the mean loss) and progress"

_LOOKAHEAD = (
    "Give params=optax.LookaheadParams.init_synced(params), and a loss that takes params.fast"
)

_MICROBATCHES = 16  # of a batch: four for each of four workers


def check(loss_fn: Any, params: Any) -> None:
    """Refuses what no rounds can use.

    Raises:
        ValueError: it is not what its name says; with what to give instead.
    """
    check_loss_fn(loss_fn)
    _check_params(params)


def check_callbacks(callbacks: Any) -> None:
    """Refuses what is no list of functions.

    Raises:
        ValueError: it is none.
    """
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise ValueError("fit: callbacks must be a list of functions, such as [print]")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuses fields that other libraries have, and says what has their place here.

    Raises:
        ValueError: there is one.
    """
    for name in ("learning_rate", "lr"):
        if name in fields:
            rate = fields[name] if isinstance(fields[name], int | float) else 1e-3
            raise ValueError(
                f"fit: there is no field {name!r}: the optimizer has it, such as "
                f"optax.adam({rate:g})"
            )
    if "batch_size" in fields:
        size = fields["batch_size"]
        raise ValueError(
            "fit: there is no field 'batch_size': a batch is microbatch_size * budget examples. "
            f"{_for_batch(size)}"
        )


def _for_batch(size: Any) -> str:
    """Which microbatches make a batch of so many examples: 16 of them, if they fit."""
    of_16 = range(groups.ExperimentConfig().microbatch_size, 1, -1)
    fitting = [each for each in of_16 if isinstance(size, int) and size > 0 and size % each == 0]
    if not fitting:
        return "Give those two, such as microbatch_size=8, budget=16 for 128 examples"
    many = next((each for each in fitting if size // each >= _MICROBATCHES), fitting[-1])
    return (
        f"For {size} examples give microbatch_size={many}, budget={size // many}; at least 4 "
        "microbatches a worker are right"
    )


def check_loss_fn(loss_fn: Any, *, caller: str = "fit") -> None:
    """Refuses what cannot be called as a loss function is.

    Raises:
        ValueError: it cannot; with what to give instead.
    """
    if _is_module(loss_fn, "flax") or not callable(loss_fn):
        raise ValueError(f"{caller}: loss_fn is {parts.shown(loss_fn)}; {_LOSS}. {_OF_FLAX}")
    if not parts.takes(loss_fn, 3):
        name = f"{getattr(loss_fn, '__name__', 'loss_fn')}{inspect.signature(loss_fn)}"
        without = "lambda params, examples, rng: loss(params, examples)"
        raise ValueError(
            f"{caller}: loss_fn is {name}, which does not take three arguments; {_LOSS}. "
            f"{_OF_FLAX}. Without random numbers: {without}"
        )


def _check_params(params: Any) -> None:
    if _is_module(params, "flax"):
        raise ValueError(f"fit: params is {parts.shown(params)}, no pytree of arrays. {_OF_FLAX}")
    for path, leaf in jax.tree.leaves_with_path(params):
        is_tensor = hasattr(leaf, "requires_grad")  # of PyTorch
        is_number = isinstance(leaf, int | float | complex)
        if not is_tensor and (hasattr(leaf, "dtype") or is_number):
            continue
        hint = "For a Flax model: loss_fn, params = hetjax.nnx_loss(model, loss)"
        if is_tensor:
            hint = "Give tensor.detach().numpy(); JAX takes the gradients"
        elif _holds_equinox(params):
            hint = (
                "Of an Equinox module train the arrays: params, static = eqx.partition(model, "
                "eqx.is_inexact_array), and in the loss model = eqx.combine(params, static)"
            )
        raise ValueError(
            f"fit: params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}; params is a "
            f"pytree of arrays. {hint}"
        )


def check_optimizer(
    optimizer: Any, params: Any, *, caller: str = "fit"
) -> optax.GradientTransformationExtraArgs:
    """Refuses what is no optimiser, and one that no round can update by.

    Returns:
        The optimiser, which may be given what a round tells whether it takes it or not.

    Raises:
        ValueError: it is one of them; with what to give instead.
    """
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise ValueError(
            f"{caller}: optimizer is {parts.shown(optimizer)}; it must be an optax optimiser, such "
            f"as optax.sgd(0.1).{_optax_for(optimizer)}"
        )
    complete = extra_arguments.with_extra_arguments(optimizer)
    dtypes = map(jnp.result_type, jax.tree.leaves(params))
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return complete  # the check of the loss refuses them
    try:
        before, after = _tried(complete, params)
    except NameError:  # of an axis, which a round has
        return complete
    except Exception as error:
        if isinstance(error, jax.errors.ConcretizationTypeError):
            if not (names := _injected(error, complete.init(params))):
                return complete
            raise ValueError(
                f"{caller}: this optimizer ({_whose(optimizer, error)}) asks for the values of "
                f"{names}: give optax.inject_hyperparams(…, static_args={names})"
            ) from error
        if not (missing := _missing(error)):
            reason = str(error).strip().split("\n")[0].rstrip(".")
            way = _LOOKAHEAD if "attribute 'fast'" in reason else _ROUND_HAS
            raise ValueError(
                f"{caller}: an update by this optimizer ({_whose(optimizer, error)}) fails: "
                f"{type(error).__name__}: {reason}. {way}"
            ) from error
        why = _ROUND_HAS if "value_fn" not in missing else groups.LINE_SEARCH
        if missing == ["value"]:
            why = (
                "Another part of it refuses what it does not know: give that part to optax.chain "
                "as optax.GradientTransformation(*part)"
            )
        raise ValueError(
            f"{caller}: the update of this optimizer ({_whose(optimizer, error)}) needs "
            f"{' and '.join(missing)}, too. {why}. Take one that needs only gradients"
        ) from None
    if _shapes(before) != _shapes(after):
        maker = f"{caller}: the update of this optimizer ({_whose(optimizer)})"
        leaves.check_kept(after, leaves.signature(before), maker)
    return complete


def check_without_loss(optimizer: Any, params: Any) -> None:
    """Refuses an optimiser that goes by the mean loss, where the local rule adds up none.

    Raises:
        ValueError: it does.
    """
    try:
        _tried(extra_arguments.with_extra_arguments(optimizer), params, without="value")
    except Exception as error:
        if "value" not in _missing(error):
            return  # the first round says more
        raise ValueError(
            "rule: this optimizer needs the mean loss (value), and the rule's loss_sum is None"
        ) from None


def _tried(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, *, without: str = ""
) -> tuple[Any, Any]:
    """The shapes of an optimiser's state before and after an update; nothing is computed."""
    dtypes = map(jnp.result_type, jax.tree.leaves(params))
    value = np.zeros((), jnp.finfo(trees.wider(jnp.float32, *dtypes)).dtype)
    extra = dict.fromkeys(extra_arguments.TOLD, value) | {"progress": np.float32(0)}
    extra.pop(without, None)

    def states(params: Any) -> tuple[Any, Any]:
        params = jax.tree.map(jnp.asarray, params)
        state = optimizer.init(params)
        updates, after = optimizer.update(params, state, params, **extra)
        optax.apply_updates(params, updates)
        return state, after

    return jax.eval_shape(states, params)


def _injected(error: Exception, state: Any) -> tuple[str, ...]:
    """Names of the injected hyperparameters that were compared where this was raised."""
    found = [value for _, value in optax.tree.get_all_with_path(state, "hyperparams")]
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        traced = {n for n, value in frame.f_locals.items() if isinstance(value, jax.core.Tracer)}
        if names := traced & set().union(*found):
            return tuple(sorted(names))
    return ()


def _shapes(state: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [leaf.shape for leaf in jax.tree.leaves(state)]


def _missing(error: Exception) -> list[str]:
    """Which arguments a function that raised this was not given."""
    is_one = isinstance(error, TypeError) and re.search("required (keyword|positional)", str(error))
    return re.findall(r"'(\w+)'", str(error)) if is_one else []


def _whose(optimizer: Any, error: Exception | None = None) -> str:
    """The maker of an optimiser; of an error the innermost one in which it was raised."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    names = " ".join([*(frame.f_code.co_qualname for frame, _ in frames), str(error)])
    makers = re.findall(r"(\w+)\.<locals>\.\w*(?:update|init)\w*", names)
    own = getattr(optimizer.update, "__qualname__", type(optimizer).__name__).split(".")[0]
    return next((name for name in reversed(makers) if name != "with_extra_arguments"), own)


def _optax_for(optimizer: Any) -> str:
    """A sentence about what was meant, or an empty string."""
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool):
        return f" With this learning rate: optax.sgd({optimizer:g}), or optax.adam({optimizer:g})"
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if "bfgs" in name:
            return f" {groups.LINE_SEARCH}"
        return f" By its name: optax.{name}(1e-3)" if hasattr(optax, name) else ""
    if inspect.isfunction(optimizer):
        return f" If {optimizer.__name__} makes one, call it, with its learning rate"
    if hasattr(getattr(optimizer, "tx", None), "update"):
        return " It holds one: give its tx, or what it was made of"
    return ""


def _holds_equinox(params: Any) -> bool:
    """Whether a module of Equinox is in it, whose leaves may be functions."""
    is_one = functools.partial(_is_module, library="equinox")
    return any(map(is_one, jax.tree.leaves(params, is_leaf=is_one)))


def _is_module(given: Any, library: str) -> bool:
    """Whether it is a module of a library, which is not imported for it."""
    return any(
        base.__module__.startswith(f"{library}.") and base.__name__ == "Module"
        for base in type(given).__mro__
    )


def check_wire(wire: str, config: Any) -> None:
    """Refuses fewer bytes where a collective adds up.

    Raises:
        ValueError: the workers neither come and go, nor are they virtual.
    """
    if not (runtime.current().seats or config.form == "virtual"):
        raise ValueError(
            f"reducer.wire: got {wire!r}, and collectives add up what these workers contribute, in "
            "its own type. Take local='virtual', or workers that come and go (--runtime=apart, or "
            "hetjax.ray.launch with elastic=True)"
        )


def check_apart(config: Any, chosen: kinds.Parts, *, one_pass: bool) -> None:
    """Refuses what workers that come and go cannot do together.

    Args:
        config: of the run.
        chosen: its parts.
        one_pass: whether a round has one pass over its examples.

    Raises:
        ValueError: the first such field, and what to do.
    """
    has = {
        "local": (config.local, config.local != "stepped"),
        "cluster.platforms": (config.cluster.platforms, bool(config.cluster.platforms)),
        "data.sharing": (config.data.sharing, config.data.sharing != "shared"),
        "reducer.name": (config.reducer.name, not chosen.reducer.is_plain_sum),
        "ordering.method": (config.ordering.method, chosen.ordering.make_observer is not None),
        "loss_fn": ("a batch_loss", not one_pass),
        "JAX": (f"{jax.device_count()} devices", not config.slices.axes and jax.device_count() > 1),
    }
    for name, (value, is_wrong) in has.items():
        if is_wrong:
            raise ValueError(
                f"{name}: got {value!r}, which a run whose workers come and go has not; start it "
                "with --runtime=joined, or over Ray without elastic=True"
            )
