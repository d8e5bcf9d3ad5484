"""A state as host arrays by name, and back: what a checkpoint is made of."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import messages, types

_INT64 = np.iinfo(np.int64)


def flatten(tree: types.PyTree, prefix: str = "") -> dict[str, np.ndarray]:
    """The leaves of a tree as host arrays by name, of which `unflatten` makes a tree again.

    A name is the prefix and the keys that lead to the leaf, with "/" between them (in a key,
    "~" becomes "~0" and "/" becomes "~1"). Python numbers become bool, int64 and float64
    arrays of no dimension. A typed random key becomes its key data, and its implementation is
    the last part of the name. The arrays are copies: what was flattened may be changed or
    donated afterwards. None and empty containers leave nothing.

    Args:
        tree: a pytree of NumPy and JAX arrays, typed random keys, NumPy scalars, bool, int and
            float. A JAX array has to lie on this process's devices, or be the same on all.
        prefix: put before every name, so several trees fit into one checkpoint.

    Raises:
        ValueError: a leaf is something else, or an int of more than 64 bits.

    Example:
        >>> arrays = flatten({"w": np.ones(2, np.float32), "seed": (3, 4)}, "run")
        >>> {name: array.tolist() for name, array in arrays.items()}
        {'run/seed/0': 3, 'run/seed/1': 4, 'run/w': [1.0, 1.0]}
    """
    named = list(_named_leaves(tree, prefix))
    for _, leaf in named:
        if isinstance(leaf, jax.Array) and not _is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()  # all copies begin before the first is waited for
    arrays = {name: _to_host(name, leaf) for name, leaf in named}
    if len(arrays) < len(named):
        raise ValueError("two leaves of the tree to be saved have the same name")
    return arrays


def unflatten(
    like: types.PyTree,
    arrays: dict[str, np.ndarray],
    prefix: str = "",
    *,
    check_shapes: bool = True,
) -> types.PyTree:
    """The stored values in the structure of `like`, each leaf of the kind that it has there.

    Python numbers stay Python numbers and NumPy stays NumPy. A JAX array is placed as the one
    in `like` is, for which every process needs all values.

    Args:
        like: a freshly made state; its values are not used.
        arrays: names and values, as `flatten` gave them; those not under the prefix are ignored.
        prefix: as given to `flatten`.
        check_shapes: False lets arrays differ from `like` in shape, not in dtype.

    Raises:
        ValueError: a leaf is missing, there is one too many, or one has another dtype or shape.

    Example:
        >>> unflatten((0, None), flatten((7, None)))
        (7, None)
    """
    named = list(_named_leaves(like, prefix))
    names = {name for name, _ in named}
    found = {n for n in arrays if not prefix or n == prefix or n.startswith(f"{prefix}/")}
    wrong = [f"{name!r} is missing in the checkpoint" for name in sorted(names - found)]
    wrong += [f"{name!r} is not known to this run" for name in sorted(found - names)]
    wrong += [
        text
        for name, leaf in named
        if name in found and (text := _difference(name, leaf, arrays[name], check_shapes))
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the checkpoint does not fit this run: {'; '.join(wrong[:3])}{more}")
    values = [_like(leaf, arrays[name]) for name, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(like), values)


Signature = dict[str, str]


def signature(state: types.PyTree) -> Signature:
    """The names, shapes and dtypes of a part's state; keeps no array."""
    return {name: _shape_and_dtype(leaf) for name, leaf in _named_leaves(state, "state")}


def check_begun(state: types.PyTree, maker: str) -> None:
    """Refuses a part's first state that no checkpoint could hold.

    Args:
        state: what a function of the part returned.
        maker: that function, as a message names it.

    Raises:
        ValueError: a leaf is no array and no number.
    """
    with messages.as_mistake(f"{maker} returned a state that cannot be saved: "):
        flatten(state, "state")


def check_kept(state: types.PyTree, before: Signature, maker: str) -> None:
    """Refuses a part's state whose leaves differ from before; arguments as for `check_begun`.

    Raises:
        ValueError: a name, shape or dtype has changed.
    """
    after = signature(state)
    for name in [*after, *before]:
        now, then = after.get(name, "gone"), before.get(name, "nothing")
        if now != then:
            raise ValueError(
                f"{maker} returned a state with {name} {now}, where init made {then}; a state keeps"
                " its structure, shapes and dtypes"
            )


_OF_NUMBERS = {kind: ((), np.dtype(kind)) for kind in (bool, int, float)}


def _shape_and_dtype(leaf: Any) -> str:
    shape, dtype = _OF_NUMBERS.get(type(leaf), ((), type(leaf)))
    return f"{getattr(leaf, 'dtype', dtype)}{list(getattr(leaf, 'shape', shape))}"


def form_of(tree: types.PyTree) -> Any:
    """The containers of a tree as JSON values, from which `build` makes it again.

    Dicts, lists and tuples stay what they are. `build` makes dicts of other containers, such as
    named tuples, and of `optax.LookaheadParams` the slow ones in both places.
    """
    if isinstance(tree, optax.LookaheadParams):
        return {"slow": form_of(tree.slow)}
    if isinstance(tree, Mapping):
        return {"dict": [[key, form_of(tree[key])] for key in sorted(tree, key=str)]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [form_of(child) for child in tree]}
    if not (children := _children(tree)):
        return {"none": []}
    if children[0][1] is tree:
        return {"leaf": []}
    return {"dict": [[name, form_of(child)] for name, child in children]}


def build(form: Any, arrays: dict[str, np.ndarray], prefix: str = "") -> types.PyTree:
    """The tree of this form, with its leaves from arrays that `flatten` has named."""
    ((kind, children),) = form.items()
    if kind == "leaf":
        return arrays[prefix]
    if kind == "none":
        return None
    if kind == "slow":
        return optax.LookaheadParams.init_synced(build(children, arrays, _joined(prefix, "slow")))
    if kind == "dict":
        return {key: build(child, arrays, _joined(prefix, str(key))) for key, child in children}
    made = [build(child, arrays, _joined(prefix, str(i))) for i, child in enumerate(children)]
    return tuple(made) if kind == "tuple" else made


def _children(tree: types.PyTree) -> list[tuple[str, Any]]:
    """The (name, child) pairs of a container that JAX knows; for a leaf, the leaf itself."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    return [(jax.tree_util.keystr(path, simple=True), child) for path, child in found]


def _joined(prefix: str, key: str) -> str:
    escaped = key.replace("~", "~0").replace("/", "~1")
    return f"{prefix}/{escaped}" if prefix else escaped


def _named_leaves(tree: types.PyTree, prefix: str) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        if _is_key(leaf):
            keys.append(str(jax.random.key_impl(leaf)))
        yield functools.reduce(_joined, keys, prefix), leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(name: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(f"{name!r} lies on devices of other processes")
        # A copy: with a view XLA would have to copy the array when the next round donates it.
        return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if isinstance(leaf, int) and not _INT64.min <= leaf <= _INT64.max:
        raise ValueError(f"{name!r} is the int {leaf}, of more than 64 bits")
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        raise ValueError(
            f"{name!r} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers"
        )
    array = np.array(leaf)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_number = jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
    if not is_number or array.dtype in (np.longdouble, np.clongdouble):
        raise ValueError(
            f"{name!r} is {array.dtype}; a checkpoint holds bools and numbers of 64 bits at most"
        )
    return array


def _difference(name: str, leaf: Any, stored: np.ndarray, check_shapes: bool) -> str | None:
    """How a stored array does not fit the leaf."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray)
    like = leaf if is_array else np.asarray(leaf)
    dtype, shape = np.dtype(like.dtype).newbyteorder("="), tuple(like.shape)
    if stored.dtype != dtype:
        return f"{name!r} is {stored.dtype} in the checkpoint and {dtype} in this run"
    if stored.shape != shape and (check_shapes or not is_array):
        return f"{name!r} is {list(stored.shape)} in the checkpoint and {list(shape)} in this run"
    return None


def _like(leaf: Any, stored: np.ndarray) -> Any:
    if _is_key(leaf):
        keys = jax.random.wrap_key_data(jnp.asarray(stored), impl=jax.random.key_impl(leaf))
        return jax.device_put(keys, leaf.sharding) if leaf.committed else keys
    if isinstance(leaf, jax.Array):
        if not leaf.committed:
            return jnp.array(stored)
        return jax.make_array_from_callback(stored.shape, leaf.sharding, stored.__getitem__)
    if isinstance(leaf, np.ndarray):
        return stored.astype(leaf.dtype)
    return stored[()] if isinstance(leaf, np.generic) else stored.item()
