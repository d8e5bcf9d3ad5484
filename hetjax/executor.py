"""Who calls functions: compiled programs, or an eager executor, which calls them with numbers.

Under `jax.disable_jit()` JAX computes each operation when it is called. Whoever calls the user's
loss or metrics asks here whether that is so. hetjax's own programs stay compiled, and JAX looks for
NaN in none of them (`jax_debug_nans`): some of their numbers may be NaN.
"""

import concurrent.futures
import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_settings = operator.attrgetter("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
_WAYS = "host_to_device", "device_to_device", "device_to_host"

EAGER = "eager"
TOLD = "debug: rounds run eagerly, worker after worker, and nothing is traced. This is slow"


def is_eager() -> bool:
    """Whether this thread calls functions with numbers."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def of(form: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, this thread calls functions with numbers, where the form of a run is eager."""
    return jax.disable_jit() if form == EAGER else contextlib.nullcontext()


def moving(function: Callable[..., Any], *, in_thread: bool = False) -> Callable[..., Any]:
    """A function of hetjax that moves arrays between host and devices, whatever JAX is told to
    refuse now; itself where JAX refuses nothing, since to allow it takes 30 µs a call. What this
    thread is allowed another one (`in_thread`) may be refused."""
    told = {getattr(jax.config, f"jax_transfer_guard_{way}") for way in _WAYS}
    is_guarded = told != {None} if in_thread else bool(told - {None, "allow"})
    return jax.transfer_guard("allow")(function) if is_guarded else function


class Inline(concurrent.futures.Executor):
    """Calls at once, in the calling thread, where a debugger is at home."""

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        """A future that is done; what the function raises is raised here."""
        done: concurrent.futures.Future = concurrent.futures.Future()
        done.set_result(function(*given, **named))
        return done


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program of hetjax's own, which stays one whatever JAX is told about the user's."""

    @functools.wraps(program)
    def called(*arguments: Any, **options: Any) -> Any:
        if not any(_settings(jax.config)):
            return program(*arguments, **options)
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return program(*arguments, **options)

    return called


def compiled_now(program: Callable[..., Any]) -> Callable[..., Any]:
    """As `compiled`, where JAX is told now to look into programs; else the program itself."""
    return compiled(program) if any(_settings(jax.config)) else program


def _anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that JAX has not traced: what it reads from outside may have changed."""
    return lambda *arguments: function(*arguments)


def shapes(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, for its shapes and types: abstract, or eagerly as it is."""
    if not is_eager():
        return jax.eval_shape(_anew(function), *arguments)
    return function(*jax.tree.map(jnp.asarray, arguments))


def program(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """`(program, what the function returns as of `shapes`)`; eagerly the first is None."""
    if is_eager():
        return None, shapes(function, *arguments)
    return jax.make_jaxpr(_anew(function), return_shape=True)(*arguments)


def contents(program: Any) -> tuple[set[str], set[Any]]:
    """Operations and types of the arrays of a jaxpr, those that it calls too; of what is none
    nothing."""
    names, dtypes = set(), set()
    for equation in getattr(program, "eqns", ()):
        names.add(equation.primitive.name)
        dtypes |= {getattr(out.aval, "dtype", None) for out in equation.outvars}
        for more in map(contents, jax.tree.leaves(list(equation.params.values()))):
            names, dtypes = names | more[0], dtypes | more[1]
    return names, dtypes


def each(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of each row of its arguments: by `jax.vmap`, or eagerly one after the other."""
    if not is_eager():
        return jax.vmap(function)(*arguments)
    size = jax.tree.leaves(arguments)[0].shape[0]
    rows = [function(*jax.tree.map(lambda x, i=i: x[i], arguments)) for i in range(size)]
    return jax.tree.map(lambda *of_rows: jnp.stack(of_rows), *rows)
