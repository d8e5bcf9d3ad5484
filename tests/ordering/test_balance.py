import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import PartitionSpec as P

from hetjax import mesh as mesh_lib
from hetjax.ordering import balance
from tests import oracles

AXIS = mesh_lib.WORKER_AXIS
FORMS = {
    "chosen": balance.balance_signs,
    "scan": balance.balance_scan,
    "chunked": balance._balance_chunked,
    "gram": balance.balance_gram,
    "gram of three": lambda x, r: balance.balance_gram(x, r, 3),
}


def cases(kind, num_diffs, size, seed):
    """Differences and a running sum; integer-valued kinds are exact, and full of ties."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.standard_normal((num_diffs, size)), rng.standard_normal(size)
    if kind == "low rank":
        basis = rng.integers(-2, 3, (2, size))
        diffs, r = rng.integers(-2, 3, (num_diffs, 2)) @ basis, rng.integers(-1, 2, 2) @ basis
    else:
        diffs, r = rng.integers(-1, 2, (num_diffs, size)), np.zeros(size)
    diffs[rng.random(num_diffs) < 0.2] = 0
    return diffs.astype(np.float64), r.astype(np.float64)


def sharded(diffs, r):
    """diffs [W, K, d], r [d] -> signs [W, K] and r [d]."""
    num_workers, _, size = diffs.shape
    shard = balance.shard_size(size, num_workers)
    shards = np.pad(r, (0, shard * num_workers - size)).reshape(num_workers, shard)

    run = over_workers(balance_sharded, num_workers)
    signs, shards = run(diffs, shards)
    return np.asarray(signs), np.asarray(shards).reshape(-1)[:size]


def balance_sharded(diffs, r):
    return balance.balance_sharded(diffs, r, AXIS)


def coordinate(r, u):
    return balance.coordinate(r, u, AXIS)


@functools.cache
def over_workers(body, num_workers):
    def one(*args):
        outputs = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], outputs)

    mesh = mesh_lib.make_worker_mesh(num_workers)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))


def in_sequence(diffs):
    """[W, K, d] as [K * W, d], timestep-major."""
    return np.swapaxes(diffs, 0, 1).reshape(-1, diffs.shape[-1])


def check_signs(actual, expected):
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=1e-12)


def test_no_differences_and_shapes_that_do_not_fit():
    signs, r = balance.balance_signs(jnp.zeros((0, 3)), jnp.ones(3))
    assert signs.shape == (0,)
    assert r.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"diffs \[2, 3\] and running_sum \[4\]"):
        balance.balance_signs(jnp.zeros((2, 3)), jnp.zeros(4))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["random", "low rank", "ties"])
def test_every_form_takes_the_signs_of_the_loop(form, kind, float64):
    run = jax.jit(FORMS[form])
    for num_diffs, size in ((1, 1), (5, 40), (16, 131)):
        for seed in range(5):
            diffs, r = cases(kind, num_diffs, size, seed)
            check_signs(run(diffs, r), oracles.pair_balance_signs(diffs, r))


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("kind", ["random", "low rank", "ties"])
def test_shards_take_the_signs_of_one_sequence(kind, num_workers, float64):
    for seed in range(3):
        diffs, r = cases(kind, 3 * num_workers, 37, seed)
        diffs = diffs.reshape(num_workers, 3, 37)
        signs, new_r = sharded(diffs, r)
        check_signs((signs.T.reshape(-1), new_r), oracles.pair_balance_signs(in_sequence(diffs), r))


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    counts=strategies.lists(strategies.integers(0, 4), min_size=4, max_size=4),
    seed=strategies.integers(0, 1000),
)
def test_workers_with_fewer_differences_are_left_out_of_the_sequence(counts, seed):
    diffs, r = cases("ties", 16, 11, seed)
    diffs = diffs.reshape(4, 4, 11).astype(np.float32)
    valid = np.arange(4) < np.array(counts)[:, None]
    diffs[~valid] = 0
    signs, new_r = sharded(diffs, r.astype(np.float32))
    expected, expected_r = oracles.pair_balance_signs(in_sequence(diffs)[valid.T.reshape(-1)], r)
    np.testing.assert_array_equal(signs.T[valid.T], expected)
    np.testing.assert_array_equal(new_r, expected_r)
    assert (signs[~valid] == 1).all()


def tree_of(flat):
    """[..., 12] as leaves of 6, 1 and 5 numbers."""
    shape = flat.shape[:-1]
    return {"a": flat[..., :6].reshape(*shape, 2, 3), "b": (flat[..., 6], flat[..., 7:])}


def flat_of(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("kind", ["random", "low rank", "ties"])
def test_workers_are_coordinated_in_rank_order(kind, num_workers, float64):
    run = over_workers(coordinate, num_workers)
    for seed in range(3):
        u, r = cases(kind, num_workers, 12, seed)
        expected = oracles.pair_balance_signs(u, r)
        rows = tree_of(np.tile(r, (num_workers, 1)))
        new_r, signs = run(rows, tree_of(u))
        for worker in range(num_workers):
            mine = jax.tree.map(lambda x, worker=worker: x[worker], new_r)
            check_signs((signs, flat_of(mine)), expected)
        new_r, signs = balance.coordinate_array(tree_of(r), tree_of(u))
        assert signs.dtype == jnp.int8
        check_signs((signs, flat_of(new_r)), expected)


def test_a_worker_that_did_nothing_gets_the_sign_plus():
    u = np.zeros((2, 12), np.float32)
    u[1] = 1.0
    _, signs = balance.coordinate_array(tree_of(jnp.ones(12)), tree_of(jnp.asarray(u)))
    assert signs.tolist() == [1, -1]


@pytest.mark.parametrize("form", FORMS)
def test_products_of_short_floats_are_summed_in_float32(form):
    # In bfloat16 256 + 1 is 256: the sum would be 0, and the sign +1.
    diffs = jnp.array([[256.0] + [1.0] * 16 + [-256.0]], jnp.bfloat16)
    signs, r = FORMS[form](diffs, jnp.ones(18, jnp.float32))
    assert signs.tolist() == [-1]
    assert r.dtype == jnp.float32
