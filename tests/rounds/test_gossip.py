"""Training by gossip, with unequal quotas and gates, against a slow reference."""

import json

import jax
import numpy as np
import optax
import pytest

from hetjax import topology
from hetjax.data import stream as stream_lib
from hetjax.ordering import orders
from tests.rounds import problems
from tests.rounds.order_reference import example_gradients

WORKERS, SIZE, BUDGET, EPOCHS = 4, 4, 8, 4
RATE, MOMENTUM = 0.3, 0.9
FORMS = ("stepped", "fused", "virtual")


def reference(data, weights, lines, *, name, graph, sharing, weighting, weighted):
    """The replicas f64[W, ...] after a trace, in the most obvious way."""
    num_examples = len(data["y"])
    kind = stream_lib.SharedStream if sharing == "shared" else stream_lib.PrivateStream
    fields = {"microbatch_size": SIZE, "ordering": orders.random_reshuffling(), "seed": 0}
    stream = kind(num_examples, WORKERS, **fields)
    share = [len(shard) / num_examples for shard in stream.shards]
    if sharing == "shared":
        share = np.full(WORKERS, 1 / WORKERS)
    of_example = np.ones(num_examples)
    if weighted:
        of_example = np.asarray(problems.example_weights(data))
    gossip = topology.REDUCERS[name](graph=graph).for_run(topology.RunFacts(WORKERS)).mixing.gossip
    x = np.stack([weights] * WORKERS)
    velocity = np.zeros_like(x)
    state = stream.init()
    for index, line in enumerate(lines):
        plan = stream.plan(state, np.array(line["quotas"]))
        matrix = gossip.matrix(gossip.active(index))
        sums = []  # of each worker's examples: gradients, weights, how many
        for worker, done in enumerate(line["microbatches_done"]):
            ids = plan.microbatches(worker, done).reshape(-1)
            ids = ids[ids >= 0]
            gradients = example_gradients(data, x[worker], ids) if len(ids) else np.zeros((0, 1))
            gradient = (gradients * of_example[ids, None]).sum(0)
            sums.append((gradient, of_example[ids].sum(), len(ids)))
        part = [share[j] if weighting == "shard" else c for j, (_, _, c) in enumerate(sums)]
        part = [p if c else 0 for p, (_, _, c) in zip(part, sums, strict=True)]
        means = [weight / max(count, 1) for _, weight, count in sums]
        mean_weight = np.dot(part, means) / sum(part)
        update = np.zeros_like(x)
        for worker, (gradient, weight, count) in enumerate(sums):
            if (weight if weighting == "shard_mean" else count) == 0:
                continue
            if weighting == "shard":
                gradient = WORKERS * share[worker] * gradient / count / mean_weight
            elif weighting == "shard_mean":
                gradient = WORKERS * share[worker] * gradient / weight
            else:
                gradient = gradient / (BUDGET * SIZE / WORKERS) / mean_weight
            velocity[worker] = MOMENTUM * velocity[worker] + gradient.reshape(weights.shape)
            update[worker] = -RATE * velocity[worker]
        if name == "d_psgd":
            x = np.tensordot(matrix, x, axes=1) + update
        else:
            x = np.tensordot(matrix, x + update, axes=1)
        state = stream.commit(state, plan, np.array(line["microbatches_done"]))
    return x


def unequal_trace(path, num_examples):
    """Quotas with zeros among them, and gates that left some of it undone."""
    rng = np.random.default_rng(3)
    left = [-(-num_examples // SIZE)] * EPOCHS
    lines = []
    while left:
        total = min(BUDGET, left[0])
        quotas = rng.multinomial(total, rng.dirichlet(np.ones(WORKERS)))
        done = quotas if rng.random() < 0.5 else rng.integers(0, quotas + 1)
        if not done.any() or (total == left[0] and total < BUDGET):
            done = quotas
        left[0] -= int(done.sum())
        if not left[0]:
            left.pop(0)
        lines.append({"quotas": quotas.tolist(), "microbatches_done": done.tolist()})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return lines


def private_trace(path):
    """Every worker does something: 16 microbatches of each shard an epoch."""
    quotas = [[2, 2, 2, 2], [4, 1, 2, 1], [1, 3, 1, 3], [1, 2, 3, 2]] * 2 * EPOCHS
    lines = [{"quotas": q, "microbatches_done": q} for q in quotas]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return lines


@pytest.mark.parametrize(
    ("name", "graph", "sharing", "weighting", "weighted", "forms"),
    [
        ("d_psgd", "ring", "shared", "shard", True, FORMS),
        ("matcha", "0-1,1-2,2-3,0-2", "shared", "example", False, FORMS),
        ("d_psgd", "one_peer_exponential", "shared", "example", False, ("stepped", "virtual")),
        ("d_psgd", "one_peer_exponential", "private", "example", True, ("virtual",)),
        ("matcha", "ring", "private", "shard", True, ("stepped", "virtual")),
    ],
)
def test_replicas_are_those_of_the_reference(
    tmp_path, float64, name, graph, sharing, weighting, weighted, forms
):
    path = tmp_path / "trace.jsonl"
    lines = unequal_trace(path, 256) if sharing == "shared" else private_trace(path)
    fields = {"reducer": {"name": name, "graph": graph}, "epochs": EPOCHS, "replay": str(path)}
    fields["data"] = {"sharing": sharing, "weighting": weighting}
    fields["loss_fn"] = problems.weighted_softmax_loss if weighted else problems.softmax_loss
    how = {"name": name, "graph": graph, **fields["data"], "weighted": weighted}
    expected = reference(*problems.given(256), lines, **how)
    for result in (problems.train(256, local=form, **fields) for form in forms):
        assert len(result.history) == len(lines)
        np.testing.assert_allclose(result.state.params, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.params, expected.mean(axis=0), atol=1e-12)
        distance = np.sqrt(((expected - expected.mean(axis=0)) ** 2).sum() / WORKERS)
        measured = [line["consensus"] for line in result.history if "consensus" in line]
        assert result.summary["gossip"]["spectral_gap"] > 0
        # Each of the at most four links has two ways.
        assert result.history[0]["bytes_sent"] in expected[0].nbytes * np.arange(0, 9, 2)
        if sharing == "shared":
            assert measured[-1]["distance"] == pytest.approx(distance, rel=1e-6)
            assert result.summary["examples_duplicated"] == 0


@pytest.mark.parametrize("loss_fn", [problems.softmax_loss, problems.weighted_softmax_loss])
def test_the_complete_graph_by_example_is_all_reduce(loss_fn, float64):
    """W = 11ᵀ/n, and each gradient over the nominal count: the pooled update, without momentum."""
    common = {"epochs": 3, "local": "virtual", "loss_fn": loss_fn, "optimizer": optax.sgd(0.3)}
    common["quota"] = {"policy": "static", "proportions": (4, 2, 1, 1)}
    pooled = problems.train(256, **common)
    complete = {"name": "matcha", "graph": "complete", "budget": 1.0}
    mixed = problems.train(256, reducer=complete, data={"weighting": "example"}, **common)
    # Full rounds, and all matchings active with alpha = 1 / n: MATCHA's updates are then mixed.
    np.testing.assert_allclose(mixed.params, pooled.params, rtol=1e-9)
    np.testing.assert_allclose(mixed.state.params, pooled.state.params, rtol=1e-9)


def test_a_step_of_ones_own_gossips():
    (data, weights), ids = problems.given(), np.arange(64).reshape(4, 4, 4)
    reducer = topology.matcha(graph="ring")
    made, state, microbatches = problems.own_step(
        ids, data, weights, optax.sgd(0.1), reducer=reducer, weighting="shard"
    )
    step = jax.jit(made)
    counts, key = np.array([4, 2, 1, 0], np.int32), jax.random.key(0)
    gossip = reducer.for_run(topology.RunFacts(4)).mixing.gossip
    x = np.stack([weights] * 4).astype(np.float64)
    for index in range(3):
        active = made.active(index)
        state, _, _ = step(state, microbatches, counts, key, active=active)
        for worker, count in enumerate(counts):
            if count:
                mean = example_gradients(data, x[worker], ids[worker, :count].reshape(-1)).mean(0)
                x[worker] -= 0.1 * mean.reshape(weights.shape)
        x = np.tensordot(gossip.matrix(active), x, axes=1)
    np.testing.assert_allclose(state.params, x, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"active: missing, must be step\.active"):
        step(state, microbatches, counts, key)
