"""Programs that reuse an argument's memory, and are compiled before they are called."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.local import jitted
from tests.rounds import problems


class Compiled:
    """Counts what is compiled, by name of the program."""

    def __init__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event, secs, *, fun_name="", **about):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(fun_name)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_what_is_compiled_ahead_is_not_compiled_again(compiled):
    def plus_one(a, b):
        return a + 1.0, b

    program = jitted.InPlace(plus_one, 0)
    given = jax.device_put((np.zeros(5), np.ones(3)), jax.devices()[1])
    compiled.names.clear()
    program.compile_ahead(*shapes(given))
    a, b = program.call(*given)
    assert compiled.names == ["jit(plus_one)"]
    assert given[0].is_deleted()
    assert not given[1].is_deleted()
    np.testing.assert_array_equal(a, np.ones(5))
    np.testing.assert_array_equal(b, np.ones(3))


def test_an_argument_without_a_place_among_the_results_stays():
    program = jitted.InPlace(lambda a: jnp.sum(a), 0)
    given = jnp.ones(5)
    assert program.call(given) == 5
    assert not given.is_deleted()


def test_what_goes_wrong_ahead_goes_wrong_in_the_call():
    def refuses(a):
        raise ValueError(f"not of {a.shape}")

    program = jitted.InPlace(refuses, 0)
    program.compile_ahead(jax.ShapeDtypeStruct((2,), np.float32))
    with pytest.raises(ValueError, match=r"not of \(2,\)"):
        program.call(jnp.zeros(2))


def test_a_call_that_comes_at_once_compiles_nothing_again(compiled):
    def slow_to_compile(a):
        for _ in range(200):
            a = jnp.sin(a @ a)
        return a

    program = jitted.InPlace(slow_to_compile, 0)
    given = jax.device_put(np.eye(4, dtype=np.float32), jax.devices()[1])
    compiled.names.clear()
    program.compile_ahead(shapes(given))
    program.call(given)
    assert compiled.names == ["jit(slow_to_compile)"]


_FAILS_WHILE_IT_COMPILES = """
import hetjax
hetjax.use_cpu_workers(2)
import jax.numpy as jnp, numpy as np, optax

params = [np.ones((64, 64), np.float32) for _ in range(60)]  # the update takes long to compile
times = []

def loss(params, batch, rng):
    times.append(1)
    if len(times) > 1:
        raise RuntimeError("of mine")
    h = batch["x"]
    for weights in params:
        h = jnp.tanh(h @ weights)
    return (h**2).sum(-1)

data = {"x": np.ones((64, 64), np.float32)}
fields = {"compilation_cache": "off", "loss_over": "microbatch", "progress": False}
hetjax.fit(loss, params, optax.adam(1e-3), data, epochs=1, budget=4, **fields)
"""


@pytest.mark.slow
def test_a_run_that_fails_while_a_program_compiles_ends_as_python_does():
    command = [sys.executable, "-c", _FAILS_WHILE_IT_COMPILES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 1, ran.stderr[-2000:]
    assert "RuntimeError: of mine" in ran.stderr


@pytest.mark.parametrize("local", ["stepped", "fused"])
@pytest.mark.parametrize("reducer", ["all_reduce", "d_psgd"])
def test_a_run_compiles_its_synchronisation_once(compiled, local, reducer):
    compiled.names.clear()
    result = problems.train(epochs=1, local=local, reducer=reducer)
    assert result.summary["rounds"] == 2
    assert compiled.names.count("jit(synchronise)") == 1
