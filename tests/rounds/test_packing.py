"""Parcels: what is unpacked is what was packed, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax import types
from hetjax.local import packing


def _tree(row_axes):
    rng = np.random.default_rng(0)
    rows = (3,) * row_axes
    return {
        "large": rng.normal(size=(*rows, 50, 60)).astype(np.float32),
        "bias": rng.normal(size=(*rows, 4, 2)).astype(np.float32),
        "nothing": np.zeros((*rows, 0), np.float32),
        "nan": np.full(rows, np.nan, np.float32),
        "tally": types.Tally(*np.arange(3, dtype=np.int32).reshape(3, *(1,) * row_axes) - 1),
        "flag": np.ones(rows, bool),
        "empty": (),
    }


@pytest.mark.parametrize("row_axes", [0, 1])
def test_a_tree_comes_out_as_it_went_in(row_axes):
    tree = _tree(row_axes)
    if row_axes:
        tree["tally"] = types.Tally(*(np.repeat(x, 3) for x in tree["tally"]))
    packed = jax.jit(lambda t: packing.pack(t, row_axes=row_axes))(tree)
    found = [packing.unpack(jax.device_get(packed)), jax.jit(packing.unpack)(packed)]
    for unpacked in found:
        assert jax.tree.structure(unpacked) == jax.tree.structure(tree)
        for ours, theirs in zip(jax.tree.leaves(unpacked), jax.tree.leaves(tree), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


def test_there_is_one_array_for_each_width_and_one_for_each_large_leaf():
    packed = packing.pack(jax.tree.map(jnp.asarray, _tree(0)), row_axes=0)
    shapes = {name: vector.shape for name, vector in packed.small.items()}
    assert shapes == {"uint32": (12,), "bool": (1,)}
    assert [leaf.shape for leaf in packed.alone] == [(50, 60)]


def test_random_keys_stay_alone_and_other_trees_as_they_are():
    key = jax.random.key(3)
    packed = packing.pack({"key": key}, row_axes=0)
    found = packing.unpack(packed)["key"]
    assert not packed.small
    assert found.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))
    tree = {"a": np.ones(2)}
    assert packing.unpack(tree) is tree
    assert packing.pack_like(tree, tree) is tree


def test_parcels_of_equal_trees_are_compiled_once():
    traced = []

    @jax.jit
    def double(packed):
        traced.append(1)
        return jax.tree.map(lambda x: x + x, packed)

    for start in (0.0, 1.0):
        double(packing.pack({"a": jnp.full((2, 3), start), "b": jnp.ones((2, 1))}))
    assert len(traced) == 1
