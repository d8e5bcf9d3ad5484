"""Models with state that training changes and gradients do not: running statistics, counters.

Each microbatch begins at the round's state. What it changes is added up over the microbatches,
weighted by their numbers of examples, and divided once. So a round is one step of a running
average, by the mean of the microbatches' statistics (ghost batch normalisation), whatever the
quotas are. Integers and booleans have no mean: their bits are counted, and the new value is taken
where all microbatches agree.

References:
    Hoffer, Hubara, Soudry, "Train longer, generalize better", 2017, arXiv 1705.08741, for the
    statistics of parts of a batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import parts, trees, types
from hetjax.losses import named as named_lib
from hetjax.parts import options

MEAN, SUM = "mean", "sum"
_ALIKE = "alike"  # the mean of what has none: the new value, if all microbatches make the same
_FORM = "loss_fn(params, state, batch, rng) -> (losses, new_state), or with a fifth argument mask"


@dataclasses.dataclass(frozen=True, eq=False)
class StatefulLoss:
    """A loss of a model that keeps state, and the state at the beginning.

    `fit` and `Run` take it as `loss_fn`. `nnx_loss` and `linen_loss` return one for a model that
    has such variables; `fit(loss_fn, …, model_state=state)` makes one of a function.

    Args:
        function: `(params, state, batch, rng) -> (losses, new_state)`. `losses` are what any
            `loss_fn` may return. With a fifth argument it gets `mask f32[B]`, 0 for padding. It
            takes what it names besides: `mask`, `frozen`, `values`.
        model_state: a pytree of arrays.
        state_reduce: what a round makes of the changes of its microbatches, by the path of a leaf
            or of all under it: "mean" (the default), weighted by examples, or of integers and
            booleans the new value, where all microbatches make the same; or "sum", which adds up
            over microbatches.

    Raises:
        ValueError: the function takes other arguments.
    """

    function: Callable[..., Any]
    model_state: types.PyTree
    state_reduce: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", named_lib.giving(self.function, 4))
        if not callable(self.function) or not parts.takes(self.function, 4 + self._by_place):
            raise ValueError(
                f"fit: with model_state loss_fn is {_FORM}; got {parts.shown(self.function)}"
                f"{getattr(self.function, 'no_state', '')}"
            )

    @functools.cached_property
    def takes_mask(self) -> bool:
        """Whether the function is told what is padding."""
        return "mask" in self.asks or self._by_place

    @functools.cached_property
    def _by_place(self) -> bool:
        takes = functools.partial(parts.takes, self.function)
        return takes(5) and not takes(4)

    @property
    def asks(self) -> tuple[str, ...]:
        """What the function names."""
        return getattr(self.function, "asks", ())

    @property
    def frozen(self) -> Any:
        """What an adapter took out of a model."""
        return getattr(self.function, "frozen", None)

    @property
    def specs(self) -> Any:
        """Of the model's variables, which an adapter made the function of."""
        return getattr(self.function, "specs", {})

    @functools.cached_property
    def modes(self) -> tuple[str, ...]:
        """What is made of the changes of each leaf of the state.

        Raises:
            ValueError: a path is not there, or a leaf has no such mean or sum.
        """
        paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(self.model_state)]
        for name, mode in self.state_reduce.items():
            if not any(_is_under(path, name) for path in paths):
                hint = options.nearest(name, paths)
                raise ValueError(f"state_reduce: {name!r} is none of {', '.join(paths)}.{hint}")
            if mode not in (MEAN, SUM):
                raise ValueError(f"state_reduce[{name!r}]: got {mode!r}, must be 'mean' or 'sum'")
        found = []
        for path, leaf in zip(paths, jax.tree.leaves(self.model_state), strict=True):
            kind = jnp.result_type(leaf)
            asked = [name for name in self.state_reduce if _is_under(path, name)]
            mode = self.state_reduce[max(asked, key=len)] if asked else MEAN
            if not jnp.issubdtype(kind, jnp.number) and (kind != jnp.bool_ or mode == SUM):
                raise ValueError(
                    f"model_state: {path} has dtype {kind}, of which no {mode} is taken; allowed "
                    "are numbers, booleans with 'mean', and jax.random.key_data of keys"
                )
            found.append(mode if mode == SUM or jnp.issubdtype(kind, jnp.inexact) else _ALIKE)
        return tuple(found)

    def __call__(self, params: types.PyTree, examples: types.PyTree, rng: jax.Array) -> Any:
        """The losses at the state of the beginning, without padding."""
        return self.apply(params, self.model_state, examples, rng)[0]

    def apply(
        self,
        params: types.PyTree,
        state: types.PyTree,
        examples: types.PyTree,
        rng: jax.Array,
        mask: Any = None,
    ) -> tuple[Any, types.PyTree]:
        """`(losses, new_state)`.

        Args:
            params: of the model.
            state: of the model, as `model_state`.
            examples: leaves `[B, …]`.
            rng: the key of the microbatch.
            mask: f32[B], 0 for padding; None: no padding.

        Returns:
            What the loss returned, and the new state, like `state`.

        Raises:
            ValueError: it returned no state, or one of another structure, shape or type.
        """
        size = jax.tree.leaves(examples)[0].shape[0]
        mask = jnp.ones(size, jnp.float32) if mask is None else mask
        more = (mask,) if self._by_place else ()
        with named_lib.scope(mask=mask):
            returned = self.function(params, state, examples, rng, *more)
        if type(returned) is not tuple or len(returned) != 2:
            raise ValueError(f"loss_fn returned {parts.shown(returned)}; with model_state: {_FORM}")
        losses, after = returned
        check_like(after, state, "loss_fn returned another form of model state")
        return losses, after

    def change(
        self, before: types.PyTree, after: types.PyTree, count: jax.Array
    ) -> types.StateChange:
        """What a microbatch of `count f[]` examples changes of the state; float32 or wider.

        Differences, so that what a microbatch leaves as it was stays as it was to the bit.

        Args:
            before: the state at the beginning of the round.
            after: the state after the microbatch.
            count: f[], examples.
        """
        olds, treedef = jax.tree.flatten(before)
        news = jax.tree.leaves_with_path(after)
        means: list[Any] = [None] * len(olds)
        sums, alike = list(means), {}
        for at, (old, (path, new), mode) in enumerate(zip(olds, news, self.modes, strict=True)):
            if mode == _ALIKE:
                bits = jnp.unpackbits(jnp.asarray(new).reshape(-1).view(jnp.uint8))
                once = (count > 0).astype(jnp.float32)
                alike[path_of(path)] = jnp.append(bits.astype(jnp.float32), 1) * once
                continue
            of_mode, times = (means, count) if mode == MEAN else (sums, count > 0)
            times = times.astype(wide_type(old))
            of_mode[at] = (jnp.asarray(new, times.dtype) - jnp.asarray(old, times.dtype)) * times
        trees_of = functools.partial(jax.tree.unflatten, treedef)
        return types.StateChange(trees_of(means), trees_of(sums), alike)

    def zeros(self, state: types.PyTree) -> types.StateChange:
        """Before the first microbatch of a round.

        Args:
            state: of the model, for its shapes.
        """
        return jax.tree.map(jnp.zeros_like, self.change(state, state, jnp.float32(0)))


def of(loss_fn: Any, model_state: types.PyTree | None, state_reduce: Any = None) -> Any:
    """The loss of a run: with a state where one is given; any other as it is.

    Raises:
        ValueError: as of `StatefulLoss`, or `state_reduce` is given without a state.
    """
    is_stateful = isinstance(loss_fn, StatefulLoss)
    if model_state is None and not is_stateful:
        if state_reduce:
            raise ValueError("fit: state_reduce is given without model_state")
        return loss_fn
    function = loss_fn.function if is_stateful else loss_fn
    begun = loss_fn.model_state if is_stateful and model_state is None else model_state
    modes = loss_fn.state_reduce if is_stateful and state_reduce is None else state_reduce
    made = StatefulLoss(function, begun, dict(modes or {}))
    _ = made.modes  # refuses what cannot be added up
    return made


def changed(state: types.PyTree, change: types.PyTree, num_examples: Any) -> types.PyTree:
    """The state after a round.

    Args:
        state: before it.
        change: a `StateChange` of all its examples; () where no rule changes the state.
        num_examples: f[]: their number.
    """
    if not isinstance(change, types.StateChange):
        return state
    scale = 1 / jnp.where(num_examples > 0, num_examples, 1)

    def one(path: Any, old: Any, mean: Any, total: Any) -> Any:
        if mean is None and total is None:
            counts = change.alike[path_of(path)]
            new = jnp.packbits(counts[:-1] > 0).view(old.dtype).reshape(old.shape)
            return jnp.where(counts[-1] > 0, new, old)
        step = total if mean is None else mean * scale.astype(mean.dtype)
        return (old.astype(step.dtype) + step).astype(old.dtype)

    # Its leaves are None where the other one of the two has a number, or where bits were counted.
    return jax.tree.map_with_path(one, state, change.means, change.sums)


def wide_type(leaf: Any) -> Any:
    """The type in which changes of a leaf are added up, and averages of it kept."""
    kind = jnp.result_type(leaf)
    return trees.wider(kind, jnp.float32) if jnp.issubdtype(kind, jnp.floating) else kind


def path_of(path: Any) -> str:
    """A path of keys as text: `BatchNorm_0.mean`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_under(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def check_like(after: types.PyTree, before: types.PyTree, told: str) -> None:
    """Refuses a tree of another structure, shapes or types.

    Raises:
        ValueError: it is one; `told` is the beginning of the message.
    """
    pairs = trees.unlike(before, after)
    wrong = [f"{path_of(path)} was {was} and is {now}" for path, was, now in pairs]
    structures: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]
    if not wrong and structures[0] != structures[1]:
        wrong.append(f"it was {structures[0]} and is {structures[1]}")
    if wrong:
        raise ValueError(f"{told}: {'; '.join(wrong[:4])}")
