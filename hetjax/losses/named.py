"""What a loss or a metric is given by name: `frozen`, `values`, `mask`.

A function gets what it names behind its first arguments. Frozen arrays that an adapter takes out of
a model are the default of the argument `frozen` of the loss that it makes: so this can be called
without them, and whoever runs it can give them as arguments of a program.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import debugging, digests, messages, parts, trees, types

NAMES = ("frozen", "values", "mask")
_MOST_BYTES = 64 << 20  # that a function may close over in silence
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


class OfModel(NamedTuple):
    """Frozen arrays that an adapter took out of a model, beside those that `fit` is given."""

    model: types.PyTree
    given: types.PyTree = ()


class Values(NamedTuple):
    """What a loss needs and no example has, and how it goes on after a round."""

    begun: types.PyTree
    update: Callable[..., types.PyTree]  # (values, params, progress, metrics) -> values
    of_progress: bool  # it follows from the progress alone, so nothing of it is kept


class Beside(NamedTuple):
    """What a loss is given beside parameters, examples and key."""

    frozen: types.PyTree = ()
    values: Values | None = None

    @property
    def named(self) -> types.Named:
        """Before the first round."""
        return types.Named(self.frozen, () if self.values is None else self.values.begun)


NOTHING = Beside()


def beside_of(loss_fn: Any) -> Beside:
    """What any loss is given beside parameters, examples and key."""
    return getattr(loss_fn, "beside", NOTHING)


@dataclasses.dataclass(frozen=True, eq=False)
class NamedLoss:
    """A loss function that asks for something by name, and what it is given."""

    function: Callable[..., Any]
    beside: Beside = NOTHING

    @property
    def asking(self) -> tuple[tuple[Callable[..., Any], int], ...]:
        """The functions that may ask, and behind how many arguments."""
        return ((self.function, 3),)

    @property
    def examples_are_apart(self) -> bool:
        """As of the function."""
        return getattr(self.function, "examples_are_apart", False)

    @property
    def takes_mask(self) -> bool:
        """Whether the function is told what is padding."""
        return "mask" in asked(self.function, 3)

    def __call__(
        self,
        params: types.PyTree,
        examples: types.PyTree,
        rng: jax.Array,
        *,
        named: types.Named | None = None,
        mask: Any = None,
    ) -> Any:
        """As the function returns it; without `named` and `mask` as before the first round."""
        size = jax.tree.leaves(examples)[0].shape[0]
        mask = jnp.ones(size, jnp.float32) if mask is None else mask
        more = arguments(self.function, self.beside.named if named is None else named, mask, skip=3)
        return self.function(params, examples, rng, **more)


def asking(loss_fn: Any) -> Any:
    """A function that asks for something by name as a `NamedLoss`; any other loss as it is."""
    is_plain = not hasattr(loss_fn, "beside") and asked(loss_fn, 3)
    return NamedLoss(loss_fn) if is_plain else loss_fn


def asked(function: Callable[..., Any], skip: int) -> tuple[str, ...]:
    """Which of `NAMES` are arguments of a function, behind its first ones."""
    return tuple(parts.asked_for(function, NAMES, skip))


def arguments(
    function: Callable[..., Any], named: types.Named, mask: Any = None, *, skip: int
) -> dict[str, Any]:
    """What a function is called with by name; what there is none of is left to its default."""
    own = isinstance(_carried(function, skip), OfModel)
    frozen = named.frozen if own else given_of(named.frozen)
    have = {"frozen": frozen, "values": named.values, "mask": mask}
    there = {name for name, tree in have.items() if jax.tree.leaves(tree)}
    return {name: have[name] for name in asked(function, skip) if name in there}


def _carried(function: Callable[..., Any], skip: int) -> types.PyTree:
    """The frozen arrays that a function has as a default."""
    if "frozen" not in asked(function, skip):
        return ()
    default = inspect.signature(function).parameters["frozen"].default
    return () if default is inspect.Parameter.empty or default is None else default


def asks_of(
    function: Callable[..., Any], skip: int, carried: OfModel | None = None
) -> list[inspect.Parameter]:
    """What a function asks for by name, with its defaults; `carried` is that of `frozen`."""
    own = inspect.signature(function).parameters
    asks = {name: own[name].replace(kind=_BY_NAME) for name in asked(function, skip)}
    if carried is not None and ("frozen" in asks or jax.tree.leaves(carried)):
        asks["frozen"] = inspect.Parameter("frozen", _BY_NAME, default=carried)
    return list(asks.values())


def signed(
    made: Callable[..., Any], asks: list[inspect.Parameter], *first: str
) -> Callable[..., Any]:
    """`made`, which takes `first` by place and anything by name, as one that asks for `asks`."""
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    made.__signature__ = inspect.Signature([*places, *asks])  # type: ignore[attr-defined]
    return made


def frozen_of(function: Callable[..., Any], given: types.PyTree, skip: int) -> types.PyTree:
    """The frozen arrays of a function: those that are given, and those that it carries."""
    own = _carried(function, skip)
    if isinstance(own, OfModel):
        return own._replace(given=given)
    return given if jax.tree.leaves(given) else own


def with_frozen(function: Callable[..., Any], frozen: types.PyTree) -> Callable[..., Any]:
    """A function of a bilevel problem that carries what it asks for; None: as it is."""
    asks = frozen is not None and "frozen" in asked(function, 3)
    return functools.partial(function, frozen=frozen) if asks else function


def given_of(frozen: types.PyTree) -> types.PyTree:
    """Those that `fit` was given, without those of a model."""
    return frozen.given if isinstance(frozen, OfModel) else frozen


def of(
    loss_fn: Any,
    frozen: types.PyTree | None = None,
    values: Any = None,
    *,
    caller: str = "fit",
    others: Sequence[tuple[Any, int]] = (),
) -> Any:
    """A loss with what it is given by name; one that asks for nothing as it is.

    Args:
        loss_fn: a loss function, or a record of one.
        frozen: arrays; None: those that it has already.
        values: as for `fit`; None: those that it has already.
        caller: who was given them.
        others: further functions that may ask for them, and behind how many arguments; or a local
            rule and 0.

    Raises:
        ValueError: nobody asks for what is given, or it asks for what is not.
    """
    if not callable(loss_fn) or not parts.takes(loss_fn, 3, *asked(loss_fn, 3)):
        return loss_fn  # which is refused
    record = loss_fn if hasattr(loss_fn, "beside") else NamedLoss(loss_fn)
    given = given_of(record.beside.frozen) if frozen is None else frozen
    found = [frozen_of(function, given, skip) for function, skip in record.asking]
    whole = next((each for each in found if isinstance(each, OfModel)), found[0])
    whole = jax.tree.map(_typed, whole)
    beside = Beside(whole, record.beside.values if values is None else values_of(values, caller))
    named = beside.named
    ways = "frozen=arrays", "values=function, or values=(initial, update)"
    for name, tree, form in zip(("frozen", "values"), (given, named.values), ways, strict=True):
        who = [(f, skip) for f, skip in (*record.asking, *others) if f is not None]
        asks = [f for f, skip in who if not skip or name in asked(f, skip)]
        if jax.tree.leaves(tree) and not asks:
            raise ValueError(
                f"{caller}: {name} is given, and loss_fn does not name it. Write "
                f"def loss_fn(params, batch, rng, *, {name})"
            )
        needs = [f for f, skip in record.asking if _must_have(f, name, skip)]
        if needs and not jax.tree.leaves(getattr(named, name)):
            raise ValueError(f"{caller}: {parts.path_of(needs[0])} asks for {name}; give {form}")
    asks_any = any(asked(function, skip) for function, skip in record.asking)
    if not asks_any and not jax.tree.leaves(named):
        return loss_fn
    return dataclasses.replace(record, beside=beside)


def _typed(leaf: Any) -> Any:
    """As an array of a type that JAX has."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, jnp.result_type(leaf))


def _must_have(function: Callable[..., Any], name: str, skip: int) -> bool:
    if name not in asked(function, skip):
        return False
    return inspect.signature(function).parameters[name].default is inspect.Parameter.empty


def _after(values: Values, params: types.PyTree, metrics: Sequence[str]) -> tuple[Any, ...]:
    """What an update is called with, for shapes and types."""
    kinds = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
    number = jnp.zeros((), trees.wider(*kinds, jnp.float32))
    told = dict.fromkeys(metrics, number) | {"loss": number, "finite": jnp.bool_(True)}
    return values.begun, params, _number(0), told


def _number(value: float) -> jax.Array:
    return jnp.asarray(value, jnp.result_type(float))


def progress_of(rounds_an_epoch: float, rounds: Any, rest: Any) -> jax.Array:
    """Epochs done, of nominal rounds and of what is too much in these, as `TrainState` has them."""
    kind = jnp.result_type(float)
    return (rounds.astype(kind) - rest.astype(kind)) / rounds_an_epoch


def check(values: Values | None, params: types.PyTree, metrics: Sequence[str]) -> None:
    """Refuses an update that changes the form of the values; `metrics` are those of the loss.

    Raises:
        ValueError: it does.
    """
    if values is None or values.of_progress or debugging.is_on():
        return
    after = debugging.shapes(values.update, *_after(values, params, metrics))

    def form(leaf: Any) -> Any:  # numbers of one kind take each other's width
        kind = jnp.dtype(jnp.result_type(leaf)).kind
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.dtype({"f": "float32"}.get(kind, "int32")))

    forms: list[Any] = [jax.tree.structure(values.begun), jax.tree.structure(after)]
    wrong = [
        f"{jax.tree_util.keystr(path)} was {was} and is {now}"
        for path, was, now in trees.unlike(*(jax.tree.map(form, x) for x in (values.begun, after)))
    ]
    if wrong or forms[0] != forms[1]:
        more = "; ".join(wrong[:4]) or f"it was {forms[0]} and is {forms[1]}"
        raise ValueError(f"values: the update returned another form: {more}")


def digest(values: Values, params: types.PyTree, metrics: Sequence[str]) -> str:
    """Of how values go on."""
    return digests.of_programs((values.update, _after(values, params, metrics)))


def tell_of_constants(who: str, program: Any, form: str) -> None:
    """Says where a function closes over so much that it ought to be given it.

    Args:
        who: what the function is called.
        program: as `debugging.program` traced it.
        form: how it is written then.
    """
    held = {id(each): getattr(each, "nbytes", 0) for each in digests.constants(program)}
    if (size := sum(held.values())) > _MOST_BYTES:
        messages.say(
            f"{who} closes over {size / 1e6:,.0f} MB of arrays, which are constants of each "
            f"program: slow to compile, and held several times. Write {form}, and give frozen="
        )


def values_of(given: Any, caller: str) -> Values:
    """What `values=` says.

    Raises:
        ValueError: it is neither a function nor a pair.
    """
    if callable(given):

        def of_progress(values: Any, params: Any, progress: Any, metrics: Any) -> Any:
            return given(progress)

        return Values(jax.device_get(jax.jit(given)(_number(0))), of_progress, True)
    if isinstance(given, tuple) and len(given) == 2 and callable(given[1]):
        begun, update = given
        if parts.takes(update, 4) and jax.tree.leaves(begun):
            return Values(jax.tree.map(_typed, begun), update, False)
    raise ValueError(
        f"{caller}: values is {parts.shown(given)}; it must be a function values(progress) -> "
        "pytree, or a pair (initial, update) with update(values, params, progress, metrics)"
    )
