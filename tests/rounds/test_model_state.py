"""Models with state: a round changes it as one device does by hand, whatever the quotas are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

SIZE = 6
VIRTUAL = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}


def examples(num=100):
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(num, 3))
    return {"x": x, "y": (x[:, 0] * x[:, 1] > 0).astype(np.int32)}  # 16 whole microbatches, and 4


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
PARTS = [  # each pair of form, gate and reducer that sums, and each policy
    ("stepped", "none", "all_reduce", "adaptive"),
    ("stepped", "first", "ring", "equal"),
    ("stepped", "quorum", "all_reduce", "static"),
    ("fused", "none", "ring", "adaptive"),
    ("virtual", "first", "all_reduce", "adaptive"),
    ("virtual", "none", "ring", "static"),
]


def by_hand(loss_fn, optimizer):
    """`(params, model state, optimiser's state, microbatches) -> the same after a round`."""

    @jax.jit
    def of_microbatch(params, state, batch):
        def total(params):
            size = len(batch["y"])
            losses, after = loss_fn.function(params, state, batch, jax.random.key(0), np.ones(size))
            return losses.sum(), after

        return jax.grad(total, has_aux=True)(params)

    def round_of(params, state, opt_state, microbatches):
        found = [of_microbatch(params, state, batch) for batch in microbatches]
        counts = [len(batch["y"]) for batch in microbatches]
        num = sum(counts)
        grads = jax.tree.map(lambda *each: sum(each) / num, *[grads for grads, _ in found])
        weighted = [
            jax.tree.map(lambda x, n=n: n * x, s) for (_, s), n in zip(found, counts, strict=True)
        ]
        state = jax.tree.map(lambda *each: sum(each) / num, *weighted)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state

    return round_of


def distance(one, other):
    return max(
        np.abs(np.subtract(*pair)).max()
        for pair in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("parts", PARTS, ids="-".join)
def test_each_of_fifty_rounds_is_that_of_one_device(adapter, parts, float64):
    form, gate, reducer, policy = parts
    loss_fn, params = ADAPTERS[adapter]()
    data, optimizer = examples(), optax.sgd(0.1)
    reference = by_hand(loss_fn, optimizer)
    quota = {"policy": policy, **({"proportions": [4, 2, 1, 1]} if policy == "static" else {})}
    quotas, sizes = set(), set()
    with hetjax.Run(
        loss_fn,
        params,
        optimizer,
        data,
        microbatch_size=SIZE,
        budget=8,
        epochs=50,
        local=form,
        gate={"trigger": gate, "quorum": 5} if gate == "quorum" else gate,
        reducer=reducer,
        quota=quota,
        cluster=VIRTUAL,
    ) as run:
        state = run.init()
        for _ in range(50):
            before = jax.device_get((run.params(state)[0], run.model_state(state)))
            state, report = run.round(state)
            ids = [row[row >= 0] for row in report.done.example_ids]
            found = jax.device_get((run.params(state)[0], run.model_state(state)))
            microbatches = [jax.tree.map(lambda leaf, row=row: leaf[row], data) for row in ids]
            expected = reference(*before, optimizer.init(params), microbatches)[:2]
            assert distance(expected, found) < 1e-12
            assert distance(before[1], found[1]) > 1e-6
            quotas.add(tuple(report.done.quotas))
            sizes.update(map(len, ids))
    assert sizes == {SIZE, 100 % SIZE}
    assert len(quotas) > 1


# --- A function of one's own, with a counter ---


def moments(h, mask):
    mean = (h * mask[:, None]).sum(0) / mask.sum()
    return mean, (((h - mean[None]) ** 2) * mask[:, None]).sum(0) / mask.sum()


def loss_with_mask(params, state, batch, rng, mask):
    mean, var = moments(batch["x"] @ params, mask)
    after = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "var": 0.9 * state["var"] + 0.1 * var,
        "calls": state["calls"] + 1,
    }
    h = (batch["x"] @ params - mean[None]) / jnp.sqrt(var + 1e-3)[None]
    return (h.sum(-1) - batch["y"]) ** 2, after


def loss_without_mask(params, state, batch, rng):
    return loss_with_mask(params, state, batch, rng, jnp.ones(batch["y"].shape))


def of_means(loss_fn):
    """Without the counter, which gossip does not take."""

    def loss(params, state, batch, rng, mask):
        losses, after = loss_fn(params, {**state, "calls": 0}, batch, rng, mask)
        return losses, {name: after[name] for name in ("mean", "var")}

    return loss


def weights():
    return np.random.default_rng(1).normal(size=(3, 4))


def begun(*names):
    state = {"mean": np.zeros(4), "var": np.ones(4), "calls": np.zeros((), int)}
    return {name: state[name] for name in names or state}


SUM = {"state_reduce": {"calls": "sum"}}
FIELDS = {"microbatch_size": SIZE, "budget": 8, "cluster": VIRTUAL, "quota": "adaptive"}


def fit(loss_fn=loss_with_mask, **fields):
    fields = {"epochs": 3, "progress": False, **SUM, **FIELDS, **fields}
    return hetjax.fit(
        loss_fn, weights(), optax.sgd(0.01), examples(), model_state=begun(), **fields
    )


@pytest.mark.parametrize("form", ["stepped", "fused", "virtual"])
def test_a_counter_counts_every_microbatch_of_all_workers(form, float64):
    result = fit(local=form)
    assert int(result.model_state["calls"]) == 3 * 17
    assert result.model_state["calls"].dtype == int


@pytest.mark.parametrize("name", ["d_psgd", "matcha"])
def test_gossip_mixes_the_state_with_the_parameters(name, float64):
    """Against each worker's own microbatches and the mixing matrix of the round."""
    names, optimizer = ("mean", "var"), optax.sgd(0.01)
    loss_fn = of_means(loss_with_mask)
    reference = by_hand(hetjax.StatefulLoss(loss_fn, begun(*names)), optimizer)
    data = examples()
    with hetjax.Run(
        loss_fn,
        weights(),
        optimizer,
        data,
        model_state=begun(*names),
        reducer={"name": name, "graph": "ring"},
        epochs=2,
        **FIELDS,
    ) as run:
        state = run.init()
        mixing = run.parts.reducer.mixing
        while not run.done(state):
            before = jax.device_get((state.train.params, state.train.model_state))
            state, report = run.round(state)
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
        assert distance(mean, run.model_state(state)) < 1e-12


def test_weights_of_a_loss_do_not_weigh_the_state(float64):
    def weighted(params, state, batch, rng, mask):
        losses, after = loss_with_mask(params, state, batch, rng, mask)
        return (losses, jnp.where(batch["y"] > 0, 7.0, 0.5)), after

    first = [fit(each, epochs=1, max_rounds=1) for each in (loss_with_mask, weighted)]
    assert distance(first[0].params, first[1].params) > 1e-4
    assert distance(first[0].model_state, first[1].model_state) == 0


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_a_run_that_was_cut_goes_on_bit_by_bit(sharing, tmp_path, float64):
    fields = {"data": {"sharing": sharing}, "checkpoint": {"every_rounds": 2}}
    whole = fit(**fields)
    cut = fit(workdir=tmp_path, max_rounds=4, **fields)
    assert cut.summary["rounds"] == 4
    gone_on = fit(workdir=tmp_path, **fields)
    assert len(gone_on.summary["resumed"]) == 1
    for name in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(whole, name), getattr(gone_on, name))
    loaded = hetjax.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded.model_state, whole.model_state)


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


def test_a_callback_is_shown_the_state_and_init_state_goes_on_from_it(float64):
    shown = []
    first = fit(callbacks=[lambda line: shown.append(line.model_state())])
    jax.tree.map(np.testing.assert_array_equal, shown[-1], first.model_state)
    second = fit(init_state=first.state, epochs=1)
    assert int(second.model_state["calls"]) == 4 * 17


def test_a_round_without_update_moves_the_state_and_other_kinds_do_not(float64):
    loss_fn = hetjax.StatefulLoss(loss_with_mask, begun(), {"calls": "sum"})
    other = {"again": hetjax.rounds.gradients.gradient_sums(loss_fn)}
    with hetjax.Run(loss_fn, weights(), None, examples(), rules=other, **FIELDS) as run:
        state = run.init()
        state, report = run.round(state)
        assert int(run.model_state(state)["calls"]) == 8
        assert report.mean.shape == (4, 3, 4)
        state, _ = run.round(state, kind="again")
        assert int(run.model_state(state)["calls"]) == 8


# --- Padding ---


@pytest.mark.parametrize("form", ["stepped", "fused", "virtual"])
@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_a_microbatch_that_is_filled_up_has_the_statistics_of_all_in_it(form, feed, float64):
    data, optimizer, last = examples(), optax.sgd(0.01), None
    with hetjax.Run(
        loss_without_mask,
        weights(),
        optimizer,
        data,
        model_state=begun(),
        local=form,
        data={"feed": feed},
        epochs=1,
        **SUM,
        **FIELDS,
    ) as run:
        state = run.init()
        while not run.done(state):
            before = jax.device_get((run.params(state)[0], run.model_state(state)))
            state, last = run.round(state)
        (row,) = [row for row in last.done.example_ids if (row < 0).any()]
        others = -2 - row[row < -1]
        assert len(row[row >= 0]) == 4
        assert len(set(others.tolist()) | set(row[row >= 0].tolist())) == SIZE
        params, model_state = before
        changes, counts, grads = [], [], []
        for ids in last.done.example_ids:
            rows = np.where(ids < 0, -2 - ids, ids)
            batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], data)
            counted = ids >= 0

            def total(params, batch=batch, counted=counted):
                losses, after = loss_without_mask(params, model_state, batch, None)
                return (losses * counted).sum(), after

            grad, after = jax.grad(total, has_aux=True)(params)
            grads.append(grad)
            counts.append(counted.sum())
            changes.append(after["mean"] - model_state["mean"])
        mean = model_state["mean"] + np.average(changes, axis=0, weights=counts)
        assert distance(mean, run.model_state(state)["mean"]) < 1e-12
        expected = params - 0.01 * sum(grads) / sum(counts)
        assert distance(expected, run.params(state)[0]) < 1e-12


def test_the_ledger_tells_what_was_dropped_from_what_is_missing(float64):
    result = fit(loss_without_mask, data={"last": "drop"})
    summary = result.summary
    assert summary["examples_processed"] == 3 * 96
    assert summary["examples_dropped"] == 3 * 4
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    assert summary["epochs"] == 3


# --- What is refused ---


def returns_none(params, state, batch, rng):
    return loss_without_mask(params, state, batch, rng)[0]


def other_shape(params, state, batch, rng):
    losses, after = loss_without_mask(params, state, batch, rng)
    return losses, {**after, "mean": after["mean"][None]}


def other_type(params, state, batch, rng):
    losses, after = loss_without_mask(params, state, batch, rng)
    return losses, {**after, "var": after["var"].astype(jnp.float16)}


def loses_a_leaf(params, state, batch, rng):
    losses, after = loss_without_mask(params, state, batch, rng)
    return losses, {name: after[name] for name in ("mean", "calls")}


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (returns_none, r"returned .*and a model_state was given.*\(losses, new_state\)"),
        (other_shape, r"mean was float64\[4\] and is float64\[1, 4\]"),
        (other_type, r"var was float64\[4\] and is float16\[4\]"),
        (loses_a_leaf, r"var is missing"),
        (lambda params, batch, rng: 0, r"with model_state loss_fn is called as .*params, state"),
    ],
)
def test_a_loss_that_does_not_keep_the_state_is_refused(loss_fn, message, float64):
    with pytest.raises(ValueError, match=message):
        fit(loss_fn)


def test_a_loss_with_a_state_and_none_given_is_refused():
    def loss_fn(params, batch, rng):
        return loss_without_mask(params, begun(), batch, rng)

    with pytest.raises(ValueError, match=r"model_state="):
        hetjax.fit(loss_fn, weights(), optax.sgd(0.01), examples(), progress=False, **FIELDS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"calls has dtype int64.*state_reduce=\{'calls': 'sum'\}"),
        ({"state_reduce": {"cals": "sum"}}, r"'cals' is no path.*Did you mean 'calls'\?"),
        ({"state_reduce": {"calls": "add"}}, r"must be 'mean' or 'sum'"),
        ({**SUM, "reducer": "d_psgd"}, r"'sum' with a reducer that gossips"),
        ({**SUM, "data": {"last": "pad"}}, r"state would be made of padding.*'fill' or 'drop'"),
        ({**SUM, "ordering": "d_grab"}, r"'d_grab' needs the gradient of each example, and the m"),
        ({**SUM, "microbatch_size": 102, "data": {"last": "drop"}}, r"fewer than microbatch_size"),
    ],
)
def test_what_cannot_be_done_with_a_state_is_refused(given, message, float64):
    with pytest.raises(ValueError, match=message):
        fit(loss_without_mask, **{"state_reduce": None, **given})


def test_metrics_of_a_model_with_state_take_it():
    with pytest.raises(ValueError, match=r"the model keeps state.*\(params, state, examples\)"):
        fit(eval_source=examples(), metrics_fn=lambda params, batch: {})
