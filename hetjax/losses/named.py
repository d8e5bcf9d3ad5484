"""What functions of the user are given by name: `frozen`, `values`, `mask`.

Whoever calls them opens a scope with what there is; a function that asks takes it from there. So a
loss keeps its three arguments wherever it is called, and what it is given is an argument of each
program, never a constant: the scope is opened in the program, of the program's own arguments.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import digests, parts, trees, types

logger = logging.getLogger(__name__)

NAMES = ("frozen", "values", "mask")
_MOST_BYTES = 64 << 20  # that a function may close over in silence
_scope: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "hetjax_named", default=MappingProxyType({})
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfModel:
    """Frozen arrays that an adapter took out of a model, beside those that `fit` is given."""

    model: types.PyTree
    owner: object = dataclasses.field(metadata={"static": True})  # that takes them, no other
    given: types.PyTree = ()


class Values(NamedTuple):
    """What a loss needs and no example has, and how it goes on after a round."""

    begun: types.PyTree = ()
    update: Any = None  # (values, params, progress, metrics) -> values; None: there are none
    of_progress: Any = None  # the function, where it follows from the progress alone

    def at(self, rounds_an_epoch: float, train: types.TrainState) -> types.PyTree:
        """Where a run goes on with a state that has none; `train` has rows, on the host."""
        if self.of_progress is None:
            return self.begun
        progress = progress_of(rounds_an_epoch, train.progress_rounds[0], train.progress_rest[0])
        return jax.device_get(jax.jit(self.of_progress)(progress))


NO_VALUES = Values()


class Beside(NamedTuple):
    """What a run gives by name."""

    frozen: types.PyTree = ()
    values: Values = NO_VALUES

    @property
    def named(self) -> types.Named:
        """Before the first round."""
        return types.Named(self.frozen, self.values.begun)


def current() -> types.Named:
    """What this scope has."""
    return types.Named(*(_scope.get().get(name, ()) for name in types.Named._fields))


def current_values_at() -> Callable[[Any], types.PyTree] | None:
    """From the epochs done to `values`, where this scope has that."""
    return _scope.get().get("values_at")


@contextlib.contextmanager
def scope(named: types.Named | None = None, **more: Any) -> Iterator[None]:
    """Inside, this thread's functions are given what they ask for."""
    of_run = {} if named is None else named._asdict()
    token = _scope.set({**_scope.get(), **of_run, **more})
    try:
        yield
    finally:
        _scope.reset(token)


def scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a `Shared` and more, in the scope of what that has by name."""

    def within(shared: types.Shared, *others: Any, **options: Any) -> Any:
        with scope(shared.named):
            return function(shared, *others, **options)

    return within


def giving(function: Any, skip: int, names: Sequence[str] = NAMES) -> Any:
    """A function that asks by name, only as one of its first arguments; any other as it is.

    Args:
        function: the user's.
        skip: how many arguments it takes by place.
        names: what it may be given.
    """
    if hasattr(function, "asks") or not callable(function):
        return function
    if not (asks := parts.asked_for(function, names, skip)):
        return function
    signature = inspect.signature(function)
    own = signature.parameters
    by_place = [each for name, each in own.items() if name not in asks]

    def given(*arguments: Any) -> Any:
        there = {**_scope.get(), "frozen": frozen_given(_scope.get().get("frozen", ()))}
        left = [name for name in asks if name not in list(own)[: len(arguments)]]
        more = {name: there[name] for name in left if jax.tree.leaves(there.get(name, ()))}
        for name in left:
            if name not in more and own[name].default is inspect.Parameter.empty:
                raise ValueError(f"{parts.path_of(function)} asks for {name}; give {name}=")
        return function(*arguments, **more)

    of_given = {"asks": asks, "__signature__": signature.replace(parameters=by_place)}
    vars(given).update(vars(function) if hasattr(function, "__dict__") else {}, **of_given)
    given.__name__ = getattr(function, "__name__", "given")
    return given


def of_model(own: OfModel) -> types.PyTree:
    """What an adapter took out of its model, as this scope has it; of another model its own."""
    found = _scope.get().get("frozen")
    return found.model if isinstance(found, OfModel) and found.owner is own.owner else own.model


def frozen_given(frozen: types.PyTree) -> types.PyTree:
    """What `fit` was given, without what is a model's."""
    return frozen.given if isinstance(frozen, OfModel) else frozen


def frozen_of(function: Any, frozen: types.PyTree) -> types.PyTree:
    """What is given, beside what an adapter's function carries; of types that JAX has."""
    own = getattr(function, "frozen", None)
    if isinstance(own, OfModel):
        frozen = dataclasses.replace(own, given=frozen_given(frozen))
    return jax.tree.map(_typed, frozen)


def _typed(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, jnp.result_type(leaf))


def beside(
    loss_fn: Any, frozen: Any, values: Any, *others: Any, caller: str, is_own: bool = False
) -> Beside:
    """What a run gives by name, checked.

    Args:
        loss_fn: which may carry a model's frozen arrays.
        frozen, values: as for `fit`; None: none.
        *others: further functions that may ask, or a source whose function may.
        caller: what is given them.
        is_own: a rule of the user's own may take what no function asks for.

    Raises:
        ValueError: `values` is none, or no function asks for what is given.
    """
    asks = {*getattr(loss_fn, "asks", ())}
    for each in others:
        asks.update(getattr(each, "asks", ()))
        asks.update(parts.asked_for(each, NAMES, 2) if callable(each) else ())
    for name, given in (("frozen", frozen), ("values", values)):
        if given is not None and name not in asks and not is_own:
            raise ValueError(
                f"{caller}: {name} is given, and loss_fn does not name it. Write "
                f"def loss_fn(params, batch, rng, *, {name})"
            )
    return Beside(frozen_of(loss_fn, () if frozen is None else frozen), _values(values, caller))


def _values(given: Any, caller: str) -> Values:
    if given is None:
        return Values()
    if callable(given):
        begun = jax.device_get(jax.jit(given)(jnp.zeros((), jnp.result_type(float))))
        return Values(begun, lambda values, params, progress, metrics: given(progress), given)
    is_pair = isinstance(given, tuple) and len(given) == 2 and callable(given[1])
    if is_pair and parts.takes(given[1], 4) and jax.tree.leaves(given[0]):
        return Values(jax.tree.map(_typed, given[0]), given[1])
    raise ValueError(
        f"{caller}: values is {parts.shown(given)}; it must be a function values(progress) -> "
        "pytree, or a pair (initial, update) with update(values, params, progress, metrics)"
    )


def progress_of(rounds_an_epoch: float, rounds: Any, rest: Any) -> jax.Array:
    """Epochs done, of nominal rounds and of what is too much in these, as `TrainState` has them."""
    kind = jnp.result_type(float)
    return (rounds.astype(kind) - rest.astype(kind)) / rounds_an_epoch


def digest(values: Values, params: types.PyTree, metrics: Sequence[str]) -> str:
    """Of how values go on; `metrics` are those of the loss."""
    kinds = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
    number = jnp.zeros((), trees.wider(*kinds, jnp.float32))
    told = dict.fromkeys(metrics, number) | {"loss": number, "finite": jnp.bool_(True)}
    progress = jnp.zeros((), jnp.result_type(float))
    return digests.of_programs((values.update, (values.begun, params, progress, told)))


def tell_of_constants(who: str, program: Any, form: str) -> None:
    """Says where a function closes over so much that it ought to be given it.

    Args:
        who: what the function is called.
        program: as `executor.program` traced it.
        form: how it is written then.
    """
    held = {id(each): getattr(each, "nbytes", 0) for each in digests.constants(program)}
    if (size := sum(held.values())) > _MOST_BYTES:
        logger.warning(
            f"{who} closes over {size / 1e6:,.0f} MB of arrays, which are constants of each "
            f"program: slow to compile, and held several times. Write {form}, and give frozen="
        )
