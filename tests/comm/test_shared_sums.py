"""Sums in memory: what one process makes of the rows of all; `test_processes.py` has real ones."""

import functools
import json
import os
import types as types_lib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax import memory, types
from hetjax import mesh as mesh_lib
from hetjax.comm import backends, communicator, shared_sums, socket_allgather, views

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs Linux")
ALONE = socket_allgather.SocketAllGather(0, {})  # of a process that has no others
SIZE = 1 << 19  # numbers of a sum that is added in slices
LIKE = {"w": jnp.zeros((3, 5)), "b": jnp.zeros(())}


def made(mesh, across=None):
    file = shared_sums.file_of_machine(mesh, LIKE, ALONE)
    return shared_sums.SharedSums(file, mesh, LIKE, None, ALONE, across)


def contributed(mesh, seed):
    """Sums of random numbers, leaves `[W, ...]`, and the same on the host."""
    rng = np.random.default_rng(seed)
    drawn = lambda leaf: rng.standard_normal((mesh.size, *leaf.shape)).astype(np.float32)  # noqa: E731
    rows = {name: drawn(leaf) for name, leaf in LIKE.items()}
    one, none = np.ones(mesh.size, np.float32), np.zeros(mesh.size, np.int32)
    made = types.Contribution(rows, one, one, (), (), types.Tally(none, none, none - 1))
    return mesh_lib.place(made, mesh), rows


def in_order(rows):
    return functools.reduce(np.add, rows)


def in_one(tree):
    """The leaves, one after the other."""
    return np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("size", [0, 1, 2 * shared_sums._BLOCK + 7])
def test_rows_are_added_in_the_order_of_the_workers(size):
    rows = np.random.default_rng(0).standard_normal((5, size)).astype(np.float32)
    before, total = rows.copy(), np.full(size, np.nan, np.float32)
    shared_sums.add_up(rows, total)
    np.testing.assert_array_equal(total, in_order(rows))
    np.testing.assert_array_equal(rows, before)


def test_each_round_has_the_total_of_its_own_sums():
    mesh = mesh_lib.make_worker_mesh(4)
    sums = made(mesh)
    totals = []
    for seed in range(3):
        given, rows = contributed(mesh, seed)
        sums.post(given)
        found = sums.total(given, np.zeros(4))
        totals.append((found.sums, in_one(jax.tree.map(in_order, rows))))
        for values, expected in totals[-2:]:  # that of the round before is still read by its update
            np.testing.assert_array_equal(values, np.broadcast_to(expected, values.shape))
        assert found.sums.sharding == given.sums["w"].sharding
        np.testing.assert_array_equal(found.weight, given.weight)


def test_who_is_ahead_overwrites_nothing():
    """Process B still adds up a round when A, ahead of it, posts the next."""
    mesh = mesh_lib.make_worker_mesh(2)
    ahead = made(mesh)
    behind = object.__new__(shared_sums.SharedSums)
    behind.__dict__.update(ahead.__dict__, _rounds=list(ahead._rounds))
    first, rows = contributed(mesh, 0)
    ahead.post(first)
    behind.post(first)
    ahead.total(first, np.zeros(2))
    second, _ = contributed(mesh, 1)
    ahead.post(second)
    found = behind.total(first, np.zeros(2)).sums
    np.testing.assert_array_equal(found[0], in_one(jax.tree.map(in_order, rows)))


class TwoMachines:
    """A mesh of three workers, the first two of this machine's process."""

    def __init__(self, mesh):
        there = types_lib.SimpleNamespace(process_index=1)
        self.shape, self.devices = {"worker": 3}, np.array([*mesh.devices, there])


def test_a_machine_adds_up_its_own_workers_and_then_those_of_the_others(monkeypatch):
    mesh = mesh_lib.make_worker_mesh(2)
    given, rows = contributed(mesh, 0)
    others = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    seen = []

    def across(total):
        seen.append(total.copy())
        total += others

    sums = made(TwoMachines(mesh), across)
    sums.post(given)
    monkeypatch.setattr(sums, "_mesh", mesh)  # it has no devices of the other machine
    found = sums.total(given, np.zeros(3)).sums
    own = in_one(jax.tree.map(in_order, rows))
    np.testing.assert_array_equal(seen, [own])
    np.testing.assert_array_equal(found, [own + others] * 2)


def machines(mesh, **fields):
    """As `backends.make` makes them of several machines, of which this process has one."""
    found = object.__new__(backends.Machines)
    found.__dict__.update(_mesh=mesh, _sockets=ALONE, _firsts=[0], _shares=True, **fields)
    return found


@pytest.mark.parametrize("free", [500, 1 << 30])
def test_where_a_machine_has_no_room_none_uses_its_own(free, monkeypatch):
    files, asked = set(os.listdir("/proc/self/fd")), []
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    monkeypatch.setattr(
        backends.Machines, "_all_machines_have", lambda self, has: asked.append(has)
    )
    assert type(machines(mesh_lib.make_worker_mesh(2)).sums(LIKE)) is communicator.Sums
    assert asked == [free > 500]
    assert set(os.listdir("/proc/self/fd")) == files


def test_totals_of_machines_are_added_up_in_place():
    total = np.arange(5, dtype=np.float32)
    backends.across_machines(mesh_lib.make_worker_mesh(1), [0])(total)  # of one machine alone
    np.testing.assert_array_equal(total, np.arange(5))


@pytest.mark.parametrize(
    ("like", "most_bytes"), [(jnp.zeros(4, jnp.float16), 1 << 30), (jnp.zeros(1000), 10_000)]
)
def test_what_does_not_fit_is_left_to_the_collectives(like, most_bytes, monkeypatch):
    monkeypatch.setattr(shared_sums, "_MOST_BYTES", most_bytes)
    assert shared_sums.file_of_machine(mesh_lib.make_worker_mesh(2), like, ALONE) is None


class Gpus:
    """A mesh of two processes with a GPU each, as the first of them sees it."""

    shape = types_lib.MappingProxyType({"worker": 2})
    devices = np.array(
        [
            types_lib.SimpleNamespace(platform="gpu", local_hardware_id=0, process_index=process)
            for process in (0, 1)
        ]
    )
    local_devices = devices[:1].tolist()


@pytest.mark.parametrize(("other", "share"), [("3", True), ("1", False)])
def test_processes_share_a_gpu_by_what_they_tell_each_other(other, share, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    class Sockets(socket_allgather.SocketAllGather):
        def __call__(self, message):
            return [message, json.dumps([[], [other]]).encode()]

    assert backends.share_gpus(Gpus, Sockets(0, {})) is share


@pytest.mark.parametrize("share", [True, False])
def test_sums_on_a_gpu_meet_in_memory_where_it_is_shared(share):
    machine = machines(Gpus, across=False, has_collectives=not share)
    assert isinstance(machine.sums(LIKE), shared_sums.SharedSums) is share


def test_processes_on_gpus_come_together_without_a_collective(monkeypatch):
    runtime = object.__new__(backends.Collectives)
    runtime._mesh = Gpus
    monkeypatch.setattr(backends.store_lib, "KeyValueStore", asked := mock.Mock())
    runtime._come_together()
    assert not asked.called


def test_what_fits_leaves_no_file_open():
    files = set(os.listdir("/proc/self/fd"))
    sums = made(mesh_lib.make_worker_mesh(2))
    del sums
    assert set(os.listdir("/proc/self/fd")) <= files


def test_slices_are_asked_for_from_the_next_member_on():
    """Else all would wait for the link of the first."""
    members, asked = [views.Member(rank, rank) for rank in range(4)], []

    def take(pieces, over):
        asked.extend(pieces)
        return [np.full(SIZE // 8, 1.0, np.float32) for _ in pieces]

    carrier = types_lib.SimpleNamespace(outlives=False)
    roster = types_lib.SimpleNamespace(own=members[1], carrier=carrier, take=take)
    sums = shared_sums.ElasticSums(roster, mesh_lib.make_worker_mesh(1), jnp.zeros(SIZE))
    put = [[(rank, number) for number in range(2)] for rank in range(4)]
    assert sums.gather(members, put, (0, 0)) == ("has",)
    assert [rank for rank, _ in asked] == [2, 2, 3, 3, 0, 0]
