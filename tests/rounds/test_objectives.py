"""What is minimised with weights, in closed form, in each combination; and against plain NumPy."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import topology, types
from hetjax.local import gradients as gradients_lib
from hetjax.local import rules
from hetjax.rounds import reduce, sync
from tests.rounds import objectives, problems

WORKERS, NOMINAL = 5, 40


def one_gate(line):
    """Whether the line is run: with one gate for each combination of all others.

    A gate decides who does how much, whatever is made of that then. The gates take turns, so that
    each is met by each reducer, and by each weighting of private data.
    """
    reducers = (*objectives.SUMS, *objectives.GOSSIPS)
    turn = objectives.WEIGHTINGS.index(line.weighting) + reducers.index(line.reducer)
    turn += 3 * (line.sharing == "shared")
    return line.gate == objectives.GATES[turn % len(objectives.GATES)]


@pytest.mark.slow
@pytest.mark.parametrize("line", [*filter(one_gate, objectives.lines())], ids="-".join)
def test_each_combination_minimises_what_the_table_says(line):
    expected = objectives.closed_form(line)
    assert objectives.reached(line) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_the_closed_forms_tell_the_weightings_apart(sharing):
    """As many different numbers as there are objectives, each apart from the others by 0.05."""
    lines = [objectives.Line(sharing, each, "d_psgd", "first") for each in objectives.WEIGHTINGS]
    assert np.diff(sorted(map(objectives.closed_form, lines))).min() > 0.05


def random_sums(rng):
    """Workers that did nothing, whose examples have no weight, and one that has nearly all."""
    counts = rng.integers(0, 13, WORKERS) * (rng.random(WORKERS) < 0.8)
    counts[rng.integers(WORKERS)] = 4
    weights = counts * rng.choice([0.0, 0.01, 1.0, 90.0], WORKERS, p=[0.2, 0.2, 0.4, 0.2])
    weights[np.argmax(counts)] += 1.0
    gradients = rng.normal(size=(WORKERS, 3)) * weights[:, None]
    counts = counts.astype(np.int32)
    return types.Contribution(
        sums=gradients,
        loss_sum=rng.normal(size=WORKERS) * weights,
        weight=weights,
        worker=(),
        evidence=(),
        tally=types.Tally(counts, counts, np.full(WORKERS, -1, np.int32)),
    )


def expected_gradients(weighting, sums, shares, *, gossips):
    """f64[W, 3], worker by worker; None for one that is not updated."""
    found = range(WORKERS)
    parts = []  # what a worker's sums count for, and what they are divided by
    for j in found:
        gradient, weight, count = sums.sums[j], sums.weight[j], sums.tally.example_count[j]
        if weighting == "shard" and count:
            parts.append((shares[j] / count * gradient, shares[j] / count * weight, shares[j]))
        elif weighting == "shard_mean" and weight:
            parts.append((shares[j] / weight * gradient, shares[j], shares[j]))
        elif weighting == "example" and count:
            parts.append((gradient, weight, float(count)))
        else:
            parts.append(None)
    there = [part for part in parts if part is not None]
    total = sum(weight for _, weight, _ in there)
    if not gossips:
        pooled = sum(gradient for gradient, _, _ in there) / total
        return [pooled] * WORKERS
    mean_weight = total / sum(amount for _, _, amount in there)
    scale = WORKERS / NOMINAL if weighting == "example" else WORKERS
    return [None if part is None else scale * part[0] / mean_weight for part in parts]


@pytest.mark.parametrize("weighting", ["shard", "example", "shard_mean"])
@pytest.mark.parametrize("name", ["all_reduce", "ring", "d_psgd", "matcha"])
def test_updates_are_those_of_plain_numpy(name, weighting, float64):
    """One update of any sums: arrays, collectives, these mapped, and with metrics given."""
    optimizer, rng = optax.sgd(1.0), np.random.default_rng(0)
    reducer = topology.REDUCERS[name]().for_run(topology.RunFacts(WORKERS))
    gossips = reducer.mixing is not None
    mesh = hetjax.make_worker_mesh(WORKERS)
    common = {
        "optimizer": optimizer,
        "reducer": reducer,
        "num_workers": WORKERS,
        "nominal_examples": NOMINAL,
        "weighting": weighting,
    }
    mapped = common | {"reducer": reducer._replace(array=None)}
    steps = rules.with_observer(gradients_lib.gradient_sums(problems.softmax_loss))
    forms = [
        jax.jit(sync.make_sync(reduce.How(**how), steps, mesh=m))
        for m, how in ((None, common), (mesh, common), (None, mapped))
    ]
    start = np.zeros(3)
    states = [
        hetjax.make_train_state(start, optimizer, num_workers=WORKERS, mesh=m)
        for m in (None, mesh, None)
    ]
    for _ in range(20):
        sums, shares = random_sums(rng), rng.dirichlet(np.ones(WORKERS))
        active = reducer.mixing.gossip.active(0) if gossips else ()
        gradients = expected_gradients(weighting, sums, shares, gossips=gossips)
        expected = np.stack([np.zeros(3) if g is None else -g for g in gradients])
        if name == "matcha":
            expected = reducer.mixing.gossip.matrix(active) @ expected
        first = None
        for form, state in zip(forms, states, strict=True):
            done = form(state, sums, shares, active, (), ())
            new, metrics = done.state, done.metrics
            np.testing.assert_allclose(new.params, expected, rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(metrics.worker_weights, sums.weight, rtol=1e-15)
            first = metrics if first is None else first
        told = jax.tree.map(np.asarray, first)  # as several processes give them
        again = forms[1](states[1], sums, shares, active, told, ()).state
        np.testing.assert_allclose(again.params, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["all_reduce", "d_psgd"])
def test_a_microbatch_that_is_left_out_leaves_the_objective(name, float64):
    """All examples of a shard are alike, so those that are left stand for the whole shard."""
    shuffled = np.random.default_rng((0, 0x5A4D)).permutation(64).reshape(4, 16)
    c, w = np.empty(64), np.empty(64)
    for shard, centre, weight in zip(shuffled, (-1.0, 0.5, 2.0, 0.25), (5, 1, 0, 2), strict=True):
        c[shard], w[shard] = centre, weight
    minimum = w @ c / w.sum()
    c[shuffled[0, :3]] = np.nan  # of the shard with the most weight
    fields = {"data": {"sharing": "private"}, "reducer": name, "nonfinite": "skip", "epochs": 48}
    fields["loss_fn"] = lambda params, batch, rng: (-batch["c"] * params[0], batch["w"])
    fields["optimizer"] = optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5))
    fields |= {"quota": "equal", "budget": 16, "local": "virtual"}
    result = problems.fit({"c": c, "w": w}, np.zeros(1), **fields)
    assert result.summary["examples_skipped"] > 48
    np.testing.assert_allclose(result.params, minimum, rtol=0, atol=1e-12)


def test_shares_are_as_exact_as_the_run(float64):
    """Five shards of 203 examples, one whole pass a round: the mean of all in float64."""
    data = {"c": 1 + np.random.default_rng(0).normal(size=203)}
    fields = {"reducer": {"name": "matcha", "graph": "complete", "budget": 1.0}, "quota": "equal"}
    fields |= {"microbatch_size": 2, "budget": 105, "epochs": 3, "optimizer": optax.sgd(1.0)}
    fields |= {"cluster": {"num_workers": 5}, "data": {"sharing": "private"}, "local": "virtual"}
    fields["loss_fn"] = lambda params, batch, rng: 0.5 * (params[0] - batch["c"]) ** 2
    result = problems.fit(data, np.zeros(1), **fields)
    assert [line["examples"] for line in result.history] == [203] * 3
    np.testing.assert_allclose(result.state.params, data["c"].mean(), rtol=0, atol=1e-13)


def test_a_weighting_that_there_is_not_is_refused():
    given = np.arange(8).reshape(2, 1, 4), *problems.given(8), optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"weighting: got 'shards', must be one of shard, example"):
        problems.own_step(*given, weighting="shards")
    with pytest.raises(ValueError, match=r"data\.weighting: got 'shard_mean'"):
        problems.train(data={"weighting": "shard_mean"})
