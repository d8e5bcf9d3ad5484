"""What a reducer of the user's is given, and what of it is refused: sums, not what divides them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import topology
from hetjax.topology import reducers
from tests.rounds import problems

DATA = {"a": np.array([3.0, 3.0, 3.0, 3.0, 3.0, 3.0], np.float32)}


def loss_fn(params, batch, rng):
    """Whose gradient is -3 for each example."""
    return -batch["a"] * params["w"]


def one_round(reduce, local="virtual", **claims):
    """The displacement of one round with a reducer whose collective is `reduce`."""
    made = topology.Reducer(
        make=lambda facts: reducers.Reduction(reduce),
        **{"keeps_replicas_equal": True, **claims},
    )
    return displacement(made, local)


def displacement(reducer, local="virtual"):
    fields = {"cluster": {"num_workers": 3}, "epochs": 1, "microbatch_size": 2, "budget": 3}
    fields |= {"loss_fn": loss_fn, "optimizer": optax.sgd(1.0), "reducer": reducer}
    result = problems.fit(DATA, {"w": np.float32(0)}, local=local, **fields)
    return float(result.params["w"])


def test_a_reducer_is_given_the_sums_alone():
    seen = []

    def total(sums, axis):
        seen.append(jax.tree.map(jnp.shape, sums))
        return jax.lax.psum(sums, axis)

    assert one_round(total) == 3
    assert seen
    assert all(shapes == {"w": ()} for shapes in seen)


def test_a_clip_acts_on_sums_and_not_on_what_divides_them():
    """Each worker's sum of 6 is clipped to 1, and the examples stay 6."""

    def clipped(sums, axis):
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(sums)))
        return jax.lax.psum(jax.tree.map(lambda x: x / jnp.maximum(norm, 1), sums), axis)

    assert one_round(clipped) == pytest.approx(3 / 6)


@pytest.mark.parametrize("local", ["virtual", "fused"])
def test_a_reducer_that_leaves_replicas_apart_is_found_in_the_first_round(local):
    def own_too(sums, axis):
        extra = jax.lax.axis_index(axis) == 1
        return jax.tree.map(lambda x: jax.lax.psum(x, axis) + extra.astype(x.dtype), sums)

    with pytest.raises(ValueError, match=r"reducer.*keeps_replicas_equal=True.*'w'.*of worker 1 "):
        one_round(own_too, local)


WRONG = {
    "another type": (
        lambda sums, axis: jax.tree.map(lambda x: jax.lax.psum(x, axis).astype(jnp.float16), sums),
        r"made float16\[3?\] of sums\['w'\] float32\[3?\], must keep",
    ),
    "none": (lambda sums, axis: None, r"made nothing of sums\['w'\]"),
    "NaN": (
        lambda sums, axis: jax.tree.map(lambda x: jax.lax.psum(x, axis) * jnp.nan, sums),
        r"it made NaN of finite sums",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_reducer_returns_is_checked(name):
    reduce, told = WRONG[name]
    with pytest.raises(ValueError, match=rf"^reducer.*{told}"):
        one_round(reduce)
