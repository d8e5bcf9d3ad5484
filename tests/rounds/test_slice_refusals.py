"""What workers of several devices do without, and what cannot be: said before it is computed."""

import dataclasses

import optax
import pytest
from jax.sharding import PartitionSpec as P

import hetjax
from tests.bilevel.rounds import problems as bilevel_problems
from tests.rounds import slice_problems

WRONG = {
    "more devices": (
        {"slices": {"data": 16}, "microbatch_size": 16},
        r"num_workers = 2 of 16 devices each, but JAX has 8",
    ),
    "unknown axis": ({"shard": lambda path, shape: P("modle")}, "slices has no axis 'modle'"),
    "fsdp without its axis": (
        {"slices": {"model": 2}, "shard": hetjax.slices.fsdp(min_size=1)},
        "fsdp cuts over 'data', and slices has model",
    ),
    "an axis twice": (
        {"slices": {"data": 2, "model": 2}, "shard": lambda path, shape: P("data", "data")},
        "more axes than the array, or an axis twice",
    ),
    "not called": ({"shard": hetjax.slices.fsdp}, r"fsdp takes no \(path, shape\); call it first"),
    "path alone": ({"shard": lambda path: P()}, r"takes no \(path, shape\)"),
    "no axes at all": ({"slices": 4}, r"slices: got 4; give axes and their sizes, {'data': 4}"),
    "no name": ({"slices": {"": 2}}, "an axis has a name"),
    "does not divide": (
        {"slices": {"data": 3}, "shard": lambda path, shape: P("data"), "microbatch_size": 3},
        "is not a multiple of 3",
    ),
    "too long": (
        {"shard": lambda path, shape: P(None, None, None, None, "data")},
        "which has more axes than",
    ),
    "no spec": ({"shard": lambda path, shape: "data"}, "'data' is no jax.sharding.PartitionSpec"),
    "other tree": ({"shard": {"embed": P()}}, "shard: it is not like the parameters: "),
    "other name": ({"shard": "fdsp"}, "slices.shard"),
    "no axes": ({"slices": {}, "shard": "fsdp"}, "shard: given without slices"),
    "size": ({"slices": {"data": -1}}, "slices.data: got -1, must be a number of devices"),
    "worker": ({"slices": {"worker": 2}}, "an axis has a name, which is not 'worker'"),
    "two left": ({"slices": {"data": 0, "model": 0}}, "must have one axis of size 0 at most"),
    "microbatch": ({"microbatch_size": 5}, "microbatch_size: got 5, must be a multiple of"),
    "fused": (
        {"local": "fused"},
        "local: got 'fused', which is refused with slices",
    ),
    "virtual": ({"local": "virtual"}, "local: got 'virtual'"),
    "gossip": ({"reducer": "d_psgd"}, "reducer.name: got 'd_psgd'"),
    "wire": (
        {"reducer": hetjax.topology.all_reduce(wire="int8")},
        "reducer.wire: got 'int8', which is refused with slices",
    ),
    "ring": ({"reducer": "ring"}, "reducer.name: got 'ring'"),  # of one vector
    "order": ({"ordering": "d_grab"}, "ordering.method: got 'd_grab'"),
    "eager": ({"debug": True}, "debug: got True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said_before_anything_is_computed(name):
    fields, message = WRONG[name]
    called = []

    def never(params, batch, rng):
        called.append(batch)
        return slice_problems.loss(params, batch, rng)

    fields = {"slices": {"data": 2}, "workers": 2} | slice_problems.FIELDS | fields
    with pytest.raises(ValueError, match=message):
        hetjax.fit(never, slice_problems.params(), optax.sgd(0.1), slice_problems.data(), **fields)
    assert not called


def test_a_loop_of_ones_own_and_two_levels_have_workers_of_one_device():
    mesh = hetjax.make_worker_mesh(2, slices={"data": 2})
    with pytest.raises(ValueError, match="make_train_step has workers of one device each"):
        hetjax.make_train_step(slice_problems.loss, optax.sgd(0.1), mesh, nominal_examples=8)
    *given, estimator = bilevel_problems.given("value_gap")
    given += estimator, optax.sgd(0.1)
    upper, lower = bilevel_problems.sources()
    sources = {"upper_source": upper, "lower_source": lower, "outer_steps": 1}
    with pytest.raises(ValueError, match="slices: the workers of a bilevel problem have a device"):
        hetjax.fit_bilevel(*given, **sources, slices={"data": 2})


@dataclasses.dataclass(frozen=True)
class Device:
    """Of a process."""

    id: int
    process_index: int
    platform: str = "cpu"


@pytest.mark.parametrize("own", [(1, 1), (3, 3)])
def test_a_slice_is_of_one_process(own):
    devices = [Device(k, process) for process, count in enumerate(own) for k in range(count)]
    with pytest.raises(ValueError, match="on devices of several processes; each process has to"):
        hetjax.make_worker_mesh(len(devices) // 2, devices, slices={"data": 2})
    assert hetjax.make_worker_mesh(len(devices), devices, slices={"data": 1})


@pytest.mark.parametrize("slices", [{"data": 0}, {"worker": 2}])
def test_a_mesh_has_axes_of_devices(slices):
    with pytest.raises(ValueError, match="axes have other names, of sizes from 1 on"):
        hetjax.make_worker_mesh(1, slices=slices)
