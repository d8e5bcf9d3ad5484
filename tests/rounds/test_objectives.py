"""What is minimised with weights, in closed form, in each combination; and against plain NumPy."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import topology, types
from hetjax.data import stream as stream_lib
from hetjax.local import gradients as gradients_lib
from hetjax.local import rules
from hetjax.ordering import orders
from hetjax.rounds import sync
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


@pytest.mark.parametrize("local", ["stepped", "fused"])
@pytest.mark.parametrize(
    ("sharing", "reducer"), [("private", "all_reduce"), ("private", "d_psgd"), ("shared", "matcha")]
)
def test_the_other_local_forms_minimise_the_same(sharing, reducer, local):
    line = objectives.Line(sharing, "shard", reducer, "none")
    expected = objectives.closed_form(line)
    assert objectives.reached(line, local=local) == pytest.approx(expected, abs=1e-12)


def test_the_closed_forms_tell_the_weightings_apart():
    """As many different numbers as there are objectives, each apart from the others by 0.05."""
    for sharing in ("shared", "private"):
        lines = [
            objectives.Line(sharing, weighting, "d_psgd", "first")
            for weighting in ("shard", "example", "shard_mean")
        ]
        values = sorted(map(objectives.closed_form, lines))
        assert np.diff(values).min() > 0.05


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
    reducer = topology.REDUCERS[name]().for_run(topology.Facts(WORKERS))
    gossips = reducer.mixing is not None
    mesh = hetjax.make_worker_mesh(WORKERS)
    common = {
        "steps": rules.with_observer(gradients_lib.gradient_sums(problems.softmax_loss)),
        "reducer": reducer,
        "num_workers": WORKERS,
        "nominal_examples": NOMINAL,
        "weighting": weighting,
    }
    mapped = common | {"reducer": reducer._replace(array=None)}
    forms = [
        jax.jit(sync.make_sync(optimizer, mesh=m, **how))
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
            done = form(state, sums, shares, active)
            new, metrics = done.state, done.metrics
            np.testing.assert_allclose(new.params, expected, rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(metrics.worker_weights, sums.weight, rtol=1e-15)
            first = metrics if first is None else first
        told = jax.tree.map(np.asarray, first)  # as several processes give them
        again = forms[1](states[1], sums, shares, active, told).state
        np.testing.assert_allclose(again.params, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weighting", ["shard", "example"])
@pytest.mark.parametrize("name", ["all_reduce", "d_psgd", "matcha"])
def test_weights_of_one_constant_change_nothing(name, weighting, float64):
    data, weights = problems.classification(), problems.initial_weights()
    fields = {
        "epochs": 2,
        "local": "virtual",
        "reducer": {"name": name},
        "data": {"sharing": "private", "weighting": weighting},
        "quota": {"policy": "static", "proportions": (4, 2, 1, 1)},
        "gate": {"trigger": "first"},
    }

    def alike(params, batch, rng):
        losses = problems.softmax_loss(params, batch, rng)
        return losses, 0 * losses + 37.5

    plain = problems.fit(data, weights, **fields)
    other = problems.fit(data, weights, loss_fn=alike, **fields)
    np.testing.assert_allclose(other.params, plain.params, rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "local"),
    [("all_reduce", "virtual"), ("ring", "stepped"), ("d_psgd", "virtual"), ("matcha", "stepped")],
)
def test_without_weights_both_shares_are_the_same_to_the_bit(name, local):
    """`shard_mean` divides by the weight of a worker's own examples, as 1 each they are counted."""
    data, weights = problems.classification(203, np.float32), problems.initial_weights(np.float32)
    shard, shard_mean = (
        problems.fit(
            data,
            weights,
            epochs=2,
            local=local,
            reducer={"name": name},
            data={"sharing": "private", "weighting": weighting},
            cluster={"secs_per_microbatch": (1, 2, 3, 4), "clock": "virtual"},
            gate={"trigger": "quorum", "quorum": 5},
        )
        for weighting in ("shard", "shard_mean")
    )
    np.testing.assert_array_equal(shard.state.params, shard_mean.state.params)


def full_pass_quadratic(rng):
    """Curvatures, centres and weights of any kind, a fifth of the weights 0."""
    size = 64
    return {
        "a": rng.uniform(0.2, 3.0, size),
        "b": rng.normal(size=size),
        "w": rng.exponential(size=size) * (rng.random(size) < 0.8),
    }


@pytest.mark.parametrize("weighting", ["shard", "shard_mean"])
def test_d_psgd_ends_where_linear_algebra_says(weighting, float64):
    """At a step h the replicas end at x = W x - h H (x - c), whose mean tends to the minimum."""
    data = full_pass_quadratic(np.random.default_rng(2))
    proportions, step = (31, 15, 7, 7), 0.1  # shards of 32, 16, 8 and 8, all in each round

    def loss(params, batch, rng):
        return 0.5 * batch["a"] * (params[0] - batch["b"]) ** 2, batch["w"]

    parts = {"data": {"sharing": "private", "weighting": weighting}, "local": "virtual"}
    result = problems.fit(
        data,
        np.zeros(1),
        loss_fn=loss,
        optimizer=optax.sgd(step),
        epochs=200,
        budget=16,
        quota={"policy": "static", "proportions": proportions},
        reducer={"name": "d_psgd", "graph": "ring"},
        **parts,
    )
    stream = stream_lib.PrivateStream(
        64,
        4,
        microbatch_size=4,
        ordering=orders.random_reshuffling(),
        seed=0,
        proportions=proportions,
    )
    gossip = topology.d_psgd().for_run(topology.Facts(4)).mixing.gossip
    matrix = gossip.matrix(gossip.active(0))
    share = np.array([len(shard) for shard in stream.shards]) / 64
    weight = np.array([data["w"][shard].sum() for shard in stream.shards])
    curvature = np.array([(data["w"] * data["a"])[shard].sum() for shard in stream.shards])
    pull = np.array([(data["w"] * data["a"] * data["b"])[shard].sum() for shard in stream.shards])
    divisor = weight / share if weighting == "shard_mean" else np.full(4, weight.sum())
    assert all(line["quotas"] == [len(s) // 4 for s in stream.shards] for line in result.history)

    def ends_at(h):
        h = 4 * h / divisor
        return np.linalg.solve(np.eye(4) - matrix + np.diag(h * curvature), h * pull)

    np.testing.assert_allclose(result.state.params[:, 0], ends_at(step), rtol=1e-10)
    minimum = (pull / divisor).sum() / (curvature / divisor).sum()
    assert ends_at(1e-8).mean() == pytest.approx(minimum, abs=1e-6)
    if weighting == "shard":
        pooled = (data["w"] * data["a"] * data["b"]).sum() / (data["w"] * data["a"]).sum()
        assert minimum == pytest.approx(pooled, rel=1e-12)


@pytest.mark.parametrize("name", ["all_reduce", "d_psgd"])
def test_a_microbatch_that_is_left_out_leaves_the_objective(name, float64):
    """All examples of a shard are alike, so those that are left stand for the whole shard."""
    shuffled = np.random.default_rng((0, 0x5A4D)).permutation(64).reshape(4, 16)
    c, w = np.empty(64), np.empty(64)
    for shard, centre, weight in zip(shuffled, (-1.0, 0.5, 2.0, 0.25), (5, 1, 0, 2), strict=True):
        c[shard], w[shard] = centre, weight
    minimum = w @ c / w.sum()
    c[shuffled[0, :3]] = np.nan  # of the shard with the most weight
    result = problems.fit(
        {"c": c, "w": w},
        np.zeros(1),
        loss_fn=lambda params, batch, rng: (-batch["c"] * params[0], batch["w"]),
        optimizer=optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5)),
        epochs=48,
        budget=16,
        local="virtual",
        quota={"policy": "equal"},
        reducer={"name": name},
        data={"sharing": "private"},
        nonfinite="skip",
    )
    assert result.summary["examples_skipped"] > 48
    np.testing.assert_allclose(result.params, minimum, rtol=0, atol=1e-12)


def test_shares_are_as_exact_as_the_run(float64):
    """Five shards of 203 examples, one whole pass a round: the mean of all in float64."""
    data = {"c": 1 + np.random.default_rng(0).normal(size=203)}
    result = problems.fit(
        data,
        np.zeros(1),
        loss_fn=lambda params, batch, rng: 0.5 * (params[0] - batch["c"]) ** 2,
        optimizer=optax.sgd(1.0),
        epochs=3,
        microbatch_size=2,
        budget=105,
        local="virtual",
        quota={"policy": "equal"},
        reducer={"name": "matcha", "graph": "complete", "budget": 1.0},
        data={"sharing": "private"},
        cluster={"num_workers": 5},
    )
    assert [line["examples"] for line in result.history] == [203] * 3
    np.testing.assert_allclose(result.state.params, data["c"].mean(), rtol=0, atol=1e-13)


def test_a_weighting_that_there_is_not_is_refused():
    mesh, optimizer = hetjax.make_worker_mesh(2), optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"weighting: got 'shards', must be one of shard, example"):
        hetjax.make_train_step(
            problems.softmax_loss, optimizer, mesh, nominal_examples=8, weighting="shards"
        )
    with pytest.raises(
        ValueError, match=r"data\.weighting: got 'shard_mean' with data\.sharing='sh"
    ):
        problems.fit(
            problems.classification(), problems.initial_weights(), data={"weighting": "shard_mean"}
        )
