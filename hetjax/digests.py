"""What does a tree hold, and what does a function compute? Digests that tell two of them apart."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hetjax import types

_PLACES = re.compile(r"0x[0-9a-f]+|(?<=Device\(id=)\d+")  # an address; one of several devices


def of_arrays(tree: types.PyTree) -> str:
    """A digest of all values of a tree of arrays, and of their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            digest.update(str(leaf.dtype).encode())
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def of_programs(*calls: tuple[Callable, tuple]) -> str:
    """A digest of what functions compute of their arguments, with all constants in them.

    Each is traced anew, so that a constant outside of it is what it is now. What a `jax.jit` of
    the user's own has kept stays.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen: dict[int, Any] = {}  # a large array may be in several of the programs: (array, digest)
    for function, arguments in calls:
        # JAX keeps traces by function
        program = jax.make_jaxpr(lambda *given, function=function: function(*given))(*arguments)
        digest.update(_PLACES.sub("", str(program.jaxpr)).encode())
        for constant in constants(program):
            if id(constant) not in seen:
                seen[id(constant)] = constant, of_arrays(constant)
            digest.update(seen[id(constant)][1].encode())
    return digest.hexdigest()


def constants(part: Any) -> Iterator[Any]:
    """The arrays in a program, and in those that it calls, on the devices or the host."""
    if hasattr(part, "eqns"):
        yield from getattr(part, "consts", ())
        for equation in part.eqns:
            yield from (atom.val for atom in equation.invars if hasattr(atom, "val"))
            for inner in jax.tree.leaves(list(equation.params.values())):
                yield from constants(inner)
    elif inspect.isfunction(called := getattr(part, "callback_func", None)):  # on the host
        held = inspect.getclosurevars(called)
        found = (*held.nonlocals.values(), *held.globals.values())
        yield from (each for each in found if isinstance(each, np.ndarray | jax.Array))
