import asyncio
import collections
import os
import shutil
import stat
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import mesh as mesh_lib
from hetjax.checkpoints import checkpoint, leaves
from hetjax.rounds import state as state_lib
from tests.checkpoints import checkpoints

Leaves = collections.namedtuple(
    "Leaves", "host device half key keys old_key numbers scalars empty nothing inner"
)


def make_leaves(scale: int = 1) -> Leaves:
    """One of every kind of leaf."""
    return Leaves(
        host=scale * np.arange(6, dtype=np.int16).reshape(2, 3),
        device=scale * jnp.linspace(0, 1, 5),
        half=(scale * jnp.linspace(-2, 2, 4)).astype(jnp.bfloat16),
        key=jax.random.key(scale),
        keys=jax.random.split(jax.random.key(scale, impl="rbg"), 3),
        old_key=jax.random.PRNGKey(scale),
        numbers=(scale == 1, scale << 40, scale / 3),
        scalars=(np.float32(scale / 7), np.int64(scale), np.bool_(scale == 1)),
        empty=np.zeros((0, 3), np.float64),
        nothing=None,
        inner={"a/b": scale * np.array([np.nan, -0.0, np.inf]), "a": {"b": np.float64(scale)}},
    )


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [checkpoints.bits(x) for x in jax.tree.leaves(actual)] == [
        checkpoints.bits(x) for x in jax.tree.leaves(expected)
    ]


# Trees


def test_every_kind_of_leaf_comes_back_as_it_was():
    arrays = leaves.flatten(make_leaves(3), "state")
    assert all(type(array) is np.ndarray for array in arrays.values())
    assert_same(leaves.unflatten(make_leaves(), arrays, "state"), make_leaves(3))


def test_names_are_the_keys_that_lead_to_a_leaf():
    names = set(leaves.flatten({"a/b": 1, "a": {"b": 2}, "c~": (3, [4])}))
    assert names == {"a~1b", "a/b", "c~0/0", "c~0/1/0"}
    assert list(leaves.flatten(5, "run")) == ["run"]


def test_flattened_arrays_are_copies():
    host, device = np.zeros(3), jnp.zeros(3)
    arrays = leaves.flatten((host, device))
    host += 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(device)
    assert device.is_deleted()
    assert arrays["0"].tolist() == arrays["1"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": "text"}, "'run/a' is a str; a checkpoint holds arrays and numbers"),
        ({"a": 1 << 64}, "'run/a' is the int 18446744073709551616, of more than 64 bits"),
        ((np.zeros(2, "M8[s]"),), "'run/0' is datetime64[s]; a checkpoint holds bools and num"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(tree, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        leaves.flatten(tree, "run")


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": np.zeros(3)}, "'run/b/0' is not known to this run"),
        ({"w": np.zeros(3), "b": (1, 2)}, "'run/b/1' is missing in the checkpoint"),
        ({"w": np.zeros(3), "b": (1.0,)}, "'run/b/0' is int64 in the checkpoint and float64 in"),
        ({"w": np.zeros(4), "b": (1,)}, r"'run/w' is \[3\] in .* and \[4\] in this run"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_by_its_leaves(like, message):
    arrays = leaves.flatten({"w": np.ones(3), "b": (7,)}, "run")
    with pytest.raises(ValueError, match=f"the checkpoint does not fit this run: {message}"):
        leaves.unflatten(like, arrays, "run")


def test_a_prefix_does_not_take_what_only_begins_like_it():
    arrays = leaves.flatten((1,), "run") | leaves.flatten((2,), "runs")
    assert leaves.unflatten((0,), arrays, "run") == (1,)


def test_shapes_may_differ_where_asked_but_numbers_stay_numbers():
    arrays = leaves.flatten((np.arange(5), 3))
    assert leaves.unflatten((np.arange(2), 0), arrays, check_shapes=False)[0].size == 5
    with pytest.raises(ValueError, match=r"'1' is \[2\] in the checkpoint"):
        leaves.unflatten((1, 2), {"0": np.array(1), "1": np.arange(2)}, check_shapes=False)


# Real states


def train_state(seed: int):
    params = {"w": jax.random.normal(jax.random.key(seed), (3, 2)), "b": jnp.ones(2, jnp.bfloat16)}
    mesh = mesh_lib.make_worker_mesh(4)
    return state_lib.make_train_state(params, optax.adam(0.1), num_workers=4, mesh=mesh)


def test_a_train_state_comes_back_on_its_devices(tmp_path):
    state, like = train_state(1), train_state(0)
    store = checkpoint.Checkpoints(tmp_path / "run")
    store.save(1, leaves.flatten(state, "train"), {})
    store.close()
    restored = leaves.unflatten(like, checkpoint.newest(tmp_path / "run").arrays, "train")
    assert_same(restored, state)
    for actual, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert actual.sharding == expected.sharding
        assert actual.committed == expected.committed


# Checkpoints


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path):
    arrays = leaves.flatten(make_leaves(2), "x") | {
        "f8": np.arange(4).astype(jnp.float8_e4m3fn),
        "i4": np.arange(4).astype(jnp.int4),
        "c": np.array([1 + 2j, -0.0], np.complex64),
        "u": np.array(2**64 - 1, np.uint64),
        "zeros": np.full(3, -0.0),
        "order": np.asfortranarray(np.arange(12).reshape(3, 4))[::2],
        "x": np.zeros(1),
        "odd ü#?%": np.ones(1),
    }
    about = {"round": 7, "digest": "abc", "versions": {"jax": jax.__version__}, "x": [1, 0.1, None]}
    store = checkpoint.Checkpoints(tmp_path / "deep" / "run")
    store.save(7, arrays, about)
    store.close()
    saved = checkpoint.newest(tmp_path / "deep" / "run")
    assert saved.step == 7
    assert saved.about == about
    checkpoints.assert_equal_arrays(saved.arrays, arrays)
    assert all(array.flags.writeable for array in saved.arrays.values())


def test_a_checkpoint_may_be_empty(tmp_path):
    store = checkpoint.Checkpoints(tmp_path)
    store.save(0, {}, {})
    store.save(1, {"e": np.zeros((2, 0), np.int8)}, {})
    store.close()
    assert checkpoint.newest(tmp_path).arrays["e"].shape == (2, 0)
    shutil.rmtree(tmp_path / "00000001")
    assert checkpoint.newest(tmp_path) == (0, {}, {})


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_the_newest_ones_are_kept(tmp_path):
    checkpoints.save_all(tmp_path, [1, 2, 30, 100_000_000], keep=3)
    assert checkpoints.names_in(tmp_path) == ["00000002", "00000030", "100000000"]
    assert checkpoint.newest(tmp_path).step == 100_000_000


@pytest.mark.parametrize("mask", [0o002, 0o077])
def test_the_umask_says_who_may_read_a_workdir(mask, tmp_path):
    before, data = os.umask(mask), {"x": np.ones(8, np.float32)}
    fields = {"workers": 1, "local": "virtual", "microbatch_size": 4, "budget": 2, "epochs": 1}
    fields |= {"writers": [hetjax.writers.csv()], "workdir": tmp_path / "whole", "progress": False}
    squares = lambda p, b, rng: (b["x"] - p) ** 2  # noqa: E731
    try:
        checkpoints.save_all(tmp_path / "run", [1])
        hetjax.fit(squares, np.float32(0), optax.sgd(0.1), data, **fields)
    finally:
        os.umask(before)
    found = [*(tmp_path / "run").rglob("*"), *(tmp_path / "whole").rglob("*"), tmp_path / "run"]
    assert len(found) > 12
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_saving_does_not_block_and_the_next_save_waits(tmp_path):
    may_go, seen = threading.Event(), []

    def on_stage(stage: str) -> None:
        seen.append(stage)
        assert stage != "arrays" or may_go.wait(20)

    store = checkpoint.Checkpoints(tmp_path, on_stage=on_stage)
    store.save(1, checkpoints.arrays_of(1), {})  # returns, although nothing can be written yet
    assert checkpoint.newest(tmp_path) is None
    second = threading.Thread(target=store.save, args=(2, checkpoints.arrays_of(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert checkpoints.names_in(tmp_path) == [".partial-00000001"]
    may_go.set()
    second.join()
    store.close()
    store.close()
    assert checkpoints.names_in(tmp_path) == ["00000001", "00000002"]
    assert seen == [*checkpoint.STAGES, *checkpoint.STAGES]


def test_what_an_interrupted_save_left_is_removed_by_the_next(tmp_path):
    checkpoints.save_all(tmp_path, [1])
    shutil.copytree(tmp_path / "00000001", tmp_path / ".partial-00000002")
    assert checkpoint.newest(tmp_path).step == 1
    checkpoints.save_all(tmp_path, [2])
    assert checkpoints.names_in(tmp_path) == ["00000001", "00000002"]


def test_a_notebook_can_read(tmp_path):
    checkpoints.save_all(tmp_path, [1])

    async def cell():  # an event loop is running there
        return checkpoint.newest(tmp_path)

    checkpoints.assert_equal_arrays(asyncio.run(cell()).arrays, checkpoints.arrays_of(1))
