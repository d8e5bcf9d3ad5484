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
