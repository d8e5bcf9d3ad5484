"""A loss whose model keeps state, and what a round makes of it by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax

SIZE = 6
VIRTUAL = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}


def examples(num=100):
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(num, 3))
    return {"x": x, "y": (x[:, 0] * x[:, 1] > 0).astype(np.int32)}  # 16 whole microbatches, and 4


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
    fields = {"model_state": begun(), "epochs": 3, "progress": False, **SUM, **FIELDS, **fields}
    return hetjax.fit(loss_fn, weights(), optax.sgd(0.01), examples(), **fields)


def run(loss_fn=loss_with_mask, optimizer=None, **fields):
    given = loss_fn, weights(), optimizer or optax.sgd(0.01), examples()
    return hetjax.Run(*given, **{**FIELDS, **fields})


def of_round(made, state):
    """What a round leaves: (its state, parameters and model's state before and after, ids)."""

    def found():
        return jax.device_get((made.params(state)[0], made.model_state(state)))

    before = found()
    state, report = made.round(state)
    return state, before, found(), report.done
