"""Models with state: a round changes it as one device does by hand, whatever the quotas are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from tests.rounds.stateful_problem import (
    FIELDS,
    SIZE,
    begun,
    by_hand,
    distance,
    examples,
    fit,
    loss_with_mask,
    of_means,
    of_round,
    run,
)


class Normed(nnx.Module):
    def __init__(self, rngs):
        more = {"param_dtype": jnp.float64, "rngs": rngs}
        self.hidden = nnx.Linear(3, 5, **more)
        self.norm = nnx.BatchNorm(5, momentum=0.9, **more)
        self.out = nnx.Linear(5, 2, **more)

    def __call__(self, x, mask=None):
        return self.out(nnx.relu(self.norm(self.hidden(x), mask=mask)))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask=None):
        more = {"param_dtype": jnp.float64}
        x = nn.Dense(5, **more)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, **more)(x, mask=mask)
        return nn.Dense(2, **more)(nn.relu(x))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def column(mask):
    return mask[:, None] > 0  # both BatchNorms count what broadcasts against what they normalise


def of_nnx():
    model = Normed(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(model)))

    def loss(model, batch, mask):
        return cross_entropy(model(batch["x"], mask=column(mask)), batch)

    return hetjax.nnx_loss(model, loss)


def of_linen():
    module = LinenNormed()
    variables = module.init(jax.random.key(0), np.zeros((1, 3)), train=False)
    variables = jax.tree.map(lambda x: x.astype(jnp.float64), variables)

    def loss(model, batch, mask):
        return cross_entropy(model(batch["x"], train=True, mask=column(mask)), batch)

    return hetjax.linen_loss(module, variables, loss)


ADAPTERS = {"nnx": of_nnx, "linen": of_linen}
PARTS = [  # forms, gates, reducers that sum and policies, each once
    ("stepped", "first", "ring", "equal"),
    ("fused", "none", "ring", "static"),
    ("virtual", "quorum", "all_reduce", "adaptive"),
]


@pytest.mark.parametrize(("adapter", "parts"), [*zip(["nnx", "linen", "nnx"], PARTS, strict=True)])
def test_each_of_fifty_rounds_is_that_of_one_device(adapter, parts, float64):
    form, gate, reducer, policy = parts
    loss_fn, params = ADAPTERS[adapter]()
    data, optimizer = examples(), optax.sgd(0.1)
    reference = by_hand(loss_fn, optimizer)
    quota = {"policy": policy, **({"proportions": [4, 2, 1, 1]} if policy == "static" else {})}
    gate = {"trigger": gate, "quorum": 5} if gate == "quorum" else gate
    fields = {"epochs": 50, "local": form, "gate": gate, "reducer": reducer, "quota": quota}
    quotas, sizes = set(), set()
    with hetjax.Run(loss_fn, params, optimizer, data, **{**FIELDS, **fields}) as made:
        state = made.init()
        for _ in range(50):
            state, before, found, done = of_round(made, state)
            ids = [row[row >= 0] for row in done.example_ids]
            microbatches = [jax.tree.map(lambda leaf, row=row: leaf[row], data) for row in ids]
            expected = reference(*before, optimizer.init(params), microbatches)[:2]
            assert distance(expected, found) < 1e-12
            assert distance(before[1], found[1]) > 1e-6
            quotas.add(tuple(done.quotas))
            sizes.update(map(len, ids))
    assert sizes == {SIZE, 100 % SIZE}
    assert len(quotas) > 1


# --- A function of one's own, with a counter ---


@pytest.mark.parametrize("name", ["d_psgd", "matcha"])
def test_gossip_mixes_the_state_with_the_parameters(name, float64):
    """Against each worker's own microbatches and the mixing matrix of the round."""
    names, optimizer = ("mean", "var"), optax.sgd(0.01)
    loss_fn = of_means(loss_with_mask)
    reference = by_hand(hetjax.StatefulLoss(loss_fn, begun(*names)), optimizer)
    data, how = examples(), {"reducer": {"name": name, "graph": "ring"}, "epochs": 2}
    with run(loss_fn, optimizer, model_state=begun(*names), **how) as made:
        state = made.init()
        mixing = made.setup.methods.reducer.mixing
        while not made.done(state):
            before = jax.device_get((state.train.params, state.train.model_state))
            state, report = made.round(state)
            after = jax.device_get((state.train.params, state.train.model_state))
            matrix = mixing.gossip.matrix(mixing.gossip.active(state.rounds_done - 1))
            own = []
            for worker in range(4):
                row = jax.tree.map(lambda leaf, w=worker: leaf[w], before)
                ids = [ids[ids >= 0] for ids in report.done.microbatches(worker)]
                batches = [jax.tree.map(lambda leaf, i=each: leaf[i], data) for each in ids]
                found = reference(*row, optimizer.init(row[0]), batches)[:2] if batches else row
                own.append(found)
            changed = jax.tree.map(lambda *rows: np.stack(rows), *own)
            mixed = before if mixing.before_update else changed
            expected = jax.tree.map(lambda rows, w=matrix: np.tensordot(w, rows, 1), mixed)
            if mixing.before_update:
                expected = jax.tree.map(
                    lambda m, new, old: m + new - old, expected, changed, before
                )
            assert distance(expected, after) < 1e-12
        assert distance(after[1]["mean"][0], after[1]["mean"][2]) > 1e-6
        mean = jax.tree.map(lambda rows: rows.mean(0), after[1])
        assert distance(mean, made.model_state(state)) < 1e-12


FACTOR, TERM = np.uint32(1664525), np.uint32(1013904223)


def alike(params, state, batch, rng):
    """Losses that tell the step, and integers that every microbatch changes alike."""
    losses = (batch["x"] @ params).sum(-1)
    step = state["step"] + 1
    after = {"step": step, "first": jnp.zeros((), bool), "hash": state["hash"] * FACTOR + TERM}
    return losses - jax.lax.stop_gradient(losses) + step[0], {**state, **after}


ALIKE = {
    "step": np.zeros((2, 1), np.int64),
    "first": np.array(True),
    "hash": np.array([0, 1, 2**32 - 1], np.uint32),
    "kept": np.array([-128, 127], np.int8),
}
UNEVEN = {"quota": {"policy": "static", "proportions": [4, 3, 1, 0.1]}}


@pytest.mark.parametrize(
    "parts",
    [
        {"local": "stepped", "gate": "first", "data": {"last": "pad"}},
        {"local": "fused", "reducer": "ring", **UNEVEN},
        {"local": "virtual", "reducer": "matcha", **UNEVEN},
        {"local": "stepped", "reducer": "d_psgd", "ema": 0.5, **UNEVEN},
    ],
)
def test_integers_that_change_alike_take_one_step_a_round(parts, float64, tmp_path):
    def loss(params, state, batch, rng, mask):
        return alike(params, state, batch, rng)

    fields = {**parts, "model_state": ALIKE, "state_reduce": {}, "workdir": tmp_path}
    fit(loss, max_rounds=2, **fields)
    result = fit(loss, **fields)
    rounds = result.summary["rounds"]
    assert [line["loss"] for line in result.history] == list(range(1, rounds + 1))
    state, expected = result.model_state, ALIKE["hash"]
    for _ in range(rounds):
        expected = expected * FACTOR + TERM
    np.testing.assert_array_equal(state["hash"], expected)
    np.testing.assert_array_equal(state["step"], np.full((2, 1), rounds))
    np.testing.assert_array_equal(state["kept"], ALIKE["kept"])
    assert not state["first"]
    for leaf, begun_leaf in zip(*map(jax.tree.leaves, (state, ALIKE)), strict=True):
        assert leaf.dtype == begun_leaf.dtype


@pytest.mark.parametrize("parts", [{}, {"reducer": "d_psgd", "local": "virtual"}])
def test_integers_that_change_unlike_are_refused_by_name(parts, float64):
    def loss(params, state, batch, rng):
        losses, after = alike(params, state, batch, rng)
        return losses, after | {"kept": state["kept"] + counted(batch)}

    def counted(batch):
        return (batch["x"][:1, :2] > 0)[0].astype(np.int8)

    message = r"round 0: .* changed kept of .* unlike .*state_reduce=\{'kept': 'sum'\}"
    with pytest.raises(ValueError, match=message):
        fit(loss, model_state=ALIKE, **{"state_reduce": {}, **parts})
    if not parts:
        fit(loss, model_state=ALIKE, state_reduce={"kept": "sum"}, max_rounds=1)


def test_weights_of_a_loss_do_not_weigh_the_state(float64):
    def weighted(params, state, batch, rng, mask):
        losses, after = loss_with_mask(params, state, batch, rng, mask)
        return (losses, jnp.where(batch["y"] > 0, 7.0, 0.5)), after

    first = [fit(each, epochs=1, max_rounds=1) for each in (loss_with_mask, weighted)]
    assert distance(first[0].params, first[1].params) > 1e-4
    assert distance(first[0].model_state, first[1].model_state) == 0


def test_the_best_state_is_that_of_the_best_parameters(float64, tmp_path):
    seen = []

    def metrics_fn(params, state, batch):
        seen.append(sorted(state))
        return {"loss": jnp.full(batch["y"].shape, state["calls"], float)}

    fields = {"eval_source": examples(), "metrics_fn": metrics_fn, "best_by": "loss"}
    result = fit(workdir=tmp_path, best_mode="min", **fields)
    assert seen[0] == ["calls", "mean", "var"]
    assert int(result.best_model_state["calls"]) == 17
    assert int(result.model_state["calls"]) == 51
    assert int(hetjax.load(tmp_path).best_model_state["calls"]) == 17
    mean = hetjax.evaluate(result.params, examples(), metrics_fn, model_state=result.model_state)
    assert mean == {"loss": 51.0}
