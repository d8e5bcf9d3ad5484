"""Reducers: the collective form, the array form, and the matrix that both must be."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax import mesh as mesh_lib
from hetjax import parts, topology
from hetjax.topology import gossip, graphs, reducers

N = 8
GOSSIP = [
    ("d_psgd", "ring"),
    ("d_psgd", "complete"),
    ("d_psgd", "one_peer_exponential"),
    ("matcha", "torus"),
]


def make(name, graph="ring", num_workers=N, **options):
    factory = topology.REDUCERS[name]
    facts = topology.RunFacts(num_workers, **{k: options.pop(k) for k in ("seed",) if k in options})
    if "graph" in parts.options_of(factory):
        options["graph"] = graph
    return factory(**options).for_run(facts)


def tree_of(num_workers=N, dtype=np.float64):
    rng = np.random.default_rng(5)
    shapes = {"small": (3, 2), "scalar": (), "large": (70_001,), "other": (5,)}
    return {k: rng.normal(size=(num_workers, *s)).astype(dtype) for k, s in shapes.items()}


def on_mesh(collective, tree, *active):
    """A collective on each worker's row, jitted, and its arguments."""

    def body(rows, active):
        out = collective(jax.tree.map(lambda x: x[0], rows), *active, mesh_lib.WORKER_AXIS)
        return jax.tree.map(lambda x: x[None], out)

    mesh = hetjax.make_worker_mesh(len(tree["scalar"]))
    rows = P(mesh_lib.WORKER_AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False)
    return jax.jit(mapped), (tree, active)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_the_ring_is_the_sum(num_workers, float64):
    tree, ring = tree_of(num_workers), make("ring", num_workers=num_workers)
    function, arguments = on_mesh(ring.collective, tree)
    around = function(*arguments)
    array = ring.array(tree)
    for name, leaf in tree.items():
        expected = np.broadcast_to(leaf.sum(axis=0), leaf.shape)
        np.testing.assert_allclose(around[name], expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(around[name], array[name])
        np.testing.assert_array_equal(around[name], np.broadcast_to(around[name][0], leaf.shape))


@pytest.mark.parametrize(("name", "graph"), GOSSIP)
def test_both_forms_are_the_mixing_matrix(name, graph, float64):
    mixing = make(name, graph).mixing
    tree = tree_of()
    function, _ = on_mesh(mixing.collective, tree)
    for index in range(4):
        active = mixing.gossip.active(index)
        matrix = mixing.gossip.matrix(active)
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
        collective = function(tree, [active])
        array = jax.jit(mixing.array)(tree, active)
        for leaf_name, leaf in tree.items():
            expected = np.tensordot(matrix, leaf, axes=1)
            np.testing.assert_allclose(collective[leaf_name], expected, atol=1e-12)
            np.testing.assert_allclose(array[leaf_name], expected, atol=1e-12)


def test_no_exchange_is_the_identity():
    mixing = make("matcha", "ring").mixing
    nothing = np.zeros(len(mixing.gossip.partners), bool)
    np.testing.assert_array_equal(mixing.gossip.matrix(nothing), np.eye(N))
    tree = tree_of(dtype=np.float32)
    function, arguments = on_mesh(mixing.collective, tree, nothing)
    jax.tree.map(np.testing.assert_array_equal, function(*arguments), tree)
    jax.tree.map(np.testing.assert_array_equal, mixing.array(tree, nothing), tree)


@pytest.mark.parametrize("name", ["ring", "d_psgd", "matcha"])
def test_only_neighbours_exchange(name):
    reducer = make(name, "torus")
    tree = tree_of(dtype=np.float32)
    if (mixing := reducer.mixing) is None:
        function, arguments = on_mesh(reducer.collective, tree)
    else:
        function, arguments = on_mesh(mixing.collective, tree, mixing.gossip.active(0))
    text = function.lower(*arguments).compile().as_text()
    assert "collective-permute" in text
    assert not re.search(r"all-gather|all-reduce|all-to-all", text)


def test_copies_sent():
    assert make("all_reduce").copies_sent(()) == 2 * 7
    assert make("ring").copies_sent(()) == 2 * 7
    assert [make("all_reduce").copies_sent((), present) for present in (1, 2, 5)] == [0, 2, 8]
    ring = make("d_psgd", "ring")
    assert ring.copies_sent(ring.mixing.gossip.active(0)) == 2 * N
    one_peer = make("d_psgd", "one_peer_exponential")
    assert one_peer.copies_sent(one_peer.mixing.gossip.active(5)) == N
    matcha = make("matcha", "ring", budget=0.5)
    sent = [matcha.copies_sent(matcha.mixing.gossip.active(r)) for r in range(400)]
    assert np.mean(sent) == pytest.approx(N, rel=0.1)  # half of the two matchings


def test_phases_follow_each_other_and_draws_depend_on_seed_and_round_alone():
    phases = gossip.d_psgd(graphs.one_peer_exponential(N))
    assert [int(np.argmax(phases.active(r))) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    one, again, other = (make("matcha", "torus", seed=s).mixing.gossip for s in (3, 3, 4))
    flags = np.array([one.active(r) for r in range(64)])
    np.testing.assert_array_equal(flags, [again.active(r) for r in range(64)])
    assert (flags != [other.active(r) for r in range(64)]).any()


def test_matcha_needs_an_undirected_graph():
    with pytest.raises(ValueError, match=r"one way.*'ring'"):
        make("matcha", "one_peer_exponential")


@pytest.mark.parametrize("num_workers", [1, 2, 4, 64])
@pytest.mark.parametrize(
    ("length", "added"), [(70_000, sum), (300, jax.jit(lambda rows: rows.sum(axis=0)))]
)
def test_long_rows_are_added_up_in_turn_and_short_ones_as_xla_does_to_the_bit(
    length, added, num_workers
):
    rows = np.random.default_rng(0).normal(size=(num_workers, length)).astype(np.float32)
    found = jax.jit(reducers.all_reduce().array)(rows)
    np.testing.assert_array_equal(found, np.tile(added(rows), (num_workers, 1)))
