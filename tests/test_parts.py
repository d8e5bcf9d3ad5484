"""The contract of each kind of part, over its registry and the user's own objects."""

import inspect
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hetjax
from experiments import option_tables
from hetjax import parts, topology
from hetjax.config import kinds
from hetjax.rounds import reduce
from hetjax.zoo import config
from tests.own_parts import OWN

ALL = [
    pytest.param(group, part, id=f"{group}-{kinds.name_of(group, part)}")
    for group, kind in kinds.KINDS.items()
    for part in [factory() for factory in kind.registry.values()] + OWN[group]
]


def of(group):
    return [param.values[1] for param in ALL if param.values[0] == group]


# --- Every kind ---


@pytest.mark.parametrize(("group", "part"), ALL)
def test_a_part_can_be_written_down_and_made_again(group, part):
    assert kinds.resolve(group, part) is part
    fields = json.loads(json.dumps(kinds.described(group, part)))
    again = kinds.resolve(group, fields)
    assert parts.made_by(again)[:2] == parts.made_by(part)[:2]
    key = kinds.KINDS[group].key
    if list(getattr(part, "problems", parts.no_problems)(parts.Facts(4, 20))):
        return  # a gate or a policy whose options have no default that works
    checked = config.validate({group: kinds.described(group, part)})
    assert getattr(getattr(checked, group), key) == fields[key]
    assert config.validate(json.loads(json.dumps(config.to_dict(checked)))) == checked


@pytest.mark.parametrize(("group", "part"), ALL)
def test_a_part_that_was_changed_is_not_the_one_that_was_made(group, part):
    name = next(iter(kinds.KINDS[group].functions))
    changed = part._replace(**{name: lambda *args: None})
    assert parts.made_by(changed) is None
    assert kinds.name_of(group, changed).startswith(kinds.GIVEN)
    again = "could not be written down.*Give the object again"
    with pytest.raises(ValueError, match=again):
        kinds.resolve(group, kinds.name_of(group, changed))


@pytest.mark.parametrize("kind", kinds.KINDS.values(), ids=list(kinds.KINDS))
def test_an_option_says_its_default_range_and_what_it_is(kind):
    for factory in kind.registry.values():
        for option in parts.options_of(factory).values():
            assert option.rule.parse(option.default) == option.default
            assert option.rule.allowed
            assert option.says
            assert len(inspect.getdoc(factory)) > 20


def test_no_option_is_left_out_of_the_configuration_or_the_table():
    fields = {field for field, *_ in option_tables.rows_of_options()}
    for group, kind in kinds.KINDS.items():
        for part, factory in kind.registry.items():
            names = inspect.signature(factory).parameters.keys()
            assert {f"{group}.{name}" for name in names} <= fields
            assert names == kinds.in_force(group, part, {}).keys()


# --- Each kind ---


@pytest.mark.parametrize("made", of("ordering"), ids=lambda p: kinds.name_of("ordering", p))
@pytest.mark.parametrize("num_examples", [1, 2, 61])
def test_an_order_is_a_permutation_in_every_pass(made, num_examples):
    rng = np.random.default_rng(0)
    state = made.init(num_examples, (3, 1))
    for _ in range(4):
        before = state.order.copy()
        np.testing.assert_array_equal(np.sort(before), np.arange(num_examples))
        cuts = np.sort(rng.integers(0, num_examples + 1, 2))
        for examples in np.split(before, cuts):
            signs = rng.choice([-1, 0, 1], len(examples)).astype(np.int8)
            state = made.place(state, examples, signs if made.make_observer else None)
    assert state.order.dtype == before.dtype


@pytest.mark.parametrize("made", of("reducer"), ids=lambda p: kinds.name_of("reducer", p))
def test_a_reducer_keeps_what_it_says(made):
    reduction = made.for_run(topology.RunFacts(4, seed=2))
    assert (reduction.mixing is not None) == made.gossips
    assert (reduction.keeps_replicas_equal, reduction.num_workers) == (
        made.keeps_replicas_equal,
        4,
    )
    sums = {"a": np.random.default_rng(0).normal(size=(4, 7)), "b": np.arange(4.0)}
    mesh = hetjax.make_worker_mesh(4)

    def body(rows):
        one = jax.tree.map(lambda x: x[0], rows)
        return jax.tree.map(lambda x: x[None], reduction.collective(one, "worker"))

    rows = P("worker")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=False)
    found, array = jax.jit(mapped)(sums), reduce.array(reduction, None).sum(sums)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, array)
    equal = all(bool((leaf == leaf[:1]).all()) for leaf in jax.tree.leaves(array))
    assert equal == (not made.gossips)
    if made.is_plain_sum:
        np.testing.assert_allclose(array["a"][0], sums["a"].sum(axis=0), rtol=1e-6)
    if made.network is not None:
        network = made.network(topology.RunFacts(4), 100, topology.links.LinkModel())
        assert network(0).copies_sent.shape
