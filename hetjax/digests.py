"""What does a tree hold, and what does a function compute? Digests that tell two of them apart."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hetjax import types

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def of_arrays(tree: types.PyTree) -> str:
    """A digest of all values of a tree of arrays, and of their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def of_programs(*calls: tuple[Callable, tuple]) -> str:
    """A digest of what functions compute of their arguments, with all constants in them."""
    digest = hashlib.blake2b(digest_size=16)
    for function, arguments in calls:
        program = jax.make_jaxpr(function)(*arguments)
        digest.update(_ADDRESS.sub("", str(program.jaxpr)).encode())
        for constant in _constants(program):
            is_key = jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key)
            plain = jax.random.key_data(constant) if is_key else constant
            digest.update(of_arrays(plain).encode())
    return digest.hexdigest()


def _constants(part: Any) -> Iterator[Any]:
    """The arrays in a program, and in those that it calls."""
    if isinstance(part, tuple | list):
        for each in part:
            yield from _constants(each)
    elif hasattr(part, "eqns"):
        for equation in part.eqns:
            literals = [getattr(atom, "val", None) for atom in equation.invars]
            yield from (value for value in literals if getattr(value, "size", 1) > 1)
            yield from _constants(list(equation.params.values()))
    elif hasattr(part, "jaxpr") and hasattr(part, "consts"):
        yield from part.consts
        yield from _constants(part.jaxpr)
