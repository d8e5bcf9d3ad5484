"""Small problems with known answers, and traces that script the quotas of a run."""

import functools
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax import quota

CLASSES, FEATURES = 3, 5


def classification(num_examples=203, dtype=np.float64):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(num_examples, FEATURES)).astype(dtype)
    return {"x": x, "y": rng.integers(CLASSES, size=num_examples).astype(np.int32)}


def initial_weights(dtype=np.float64):
    return np.random.default_rng(8).normal(size=(FEATURES, CLASSES)).astype(dtype)


def softmax_loss(weights, batch, rng):
    del rng
    log_probabilities = jax.nn.log_softmax(batch["x"] @ weights)
    return -jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1)[:, 0]


def example_weights(batch):
    """Of each example, by its first feature: half of them 0, the largest about 7."""
    return jnp.maximum(batch["x"][:, 0], 0) ** 2


def weighted_softmax_loss(weights, batch, rng):
    return softmax_loss(weights, batch, rng), example_weights(batch)


def varying_softmax_loss(weights, batch, rng):
    """With weights that depend on the parameters."""
    losses = softmax_loss(weights, batch, rng)
    return hetjax.Losses(losses, example_weights(batch) + 1 / (1 + losses))


def _centred_softmax_loss(weights, state, batch, rng):
    mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
    centred = {**batch, "x": batch["x"] - state["mean"][None]}
    return softmax_loss(weights, centred, rng), {"mean": mean}


stateful_softmax_loss = hetjax.StatefulLoss(_centred_softmax_loss, {"mean": np.ones(FEATURES)})
"""Of features less their running mean, which is the model's state."""


def embed(weights, batch, rng):
    """Of features of which some are dropped; and what tells the classes."""
    x = batch["x"]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))
    if not rng.ndim:  # one key for all
        kept = functools.partial(jax.random.bernoulli, p=0.8, shape=x.shape)
    rows = (x * kept(rng).astype(x.dtype)) @ weights
    is_of = batch["y"][:, None] == jnp.arange(CLASSES)[None].astype(batch["y"].dtype)
    return {"rows": rows, "y": is_of.astype(x.dtype)}


def contrast(weights, embedded, mask):
    """Of each example to those of its class, by a temperature that is trained, too."""
    rows, y = embedded["rows"], embedded["y"]
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)  # no number where a row is 0
    mask = mask.astype(rows.dtype)
    scores = jnp.exp(weights[0, 0]) * (rows @ rows.T)
    is_other = mask[None] * (1 - jnp.eye(len(rows), dtype=rows.dtype))
    log_chances = jax.nn.log_softmax(jnp.where(is_other > 0, scores, -1e9), axis=1)
    is_like = is_other * (y @ y.T)
    num = jnp.maximum(is_like.sum(axis=1), 1)
    return -jnp.sum(mask * (is_like * log_chances).sum(axis=1) / num) / jnp.sum(mask)


contrastive_loss = hetjax.batch_loss(embed, contrast)
"""Over all examples of a round."""


def press_ctrl_c(when):
    """A callback that ends the run as Ctrl-C does, after a round for which `when(line)` is true."""

    def callback(line):
        if when(line):
            signal.raise_signal(signal.SIGINT)

    return callback


def measured_softmax_loss(weights, batch, rng):
    """With weights and metrics: a truth, the losses once more, and one with weights of its own."""
    losses, w = weighted_softmax_loss(weights, batch, rng)
    is_right = (batch["x"] @ weights).argmax(-1).astype(batch["y"].dtype) == batch["y"]
    each = is_right, jnp.ones_like(losses)
    return hetjax.Losses(losses, w, {"accuracy": is_right, "again": losses, "each": each})


def round_totals(num_examples, epochs, microbatch_size, budget):
    """Microbatches of each round: the whole budget, and in an epoch's last round the rest."""
    left = -(-num_examples // microbatch_size)
    epoch = [budget] * (left // budget) + ([left % budget] if left % budget else [])
    return epoch * epochs


def write_trace(path, totals, num_workers, seed=0):
    """A trace of random quotas, with zeros and whole rounds for one worker alone among them."""
    rng = np.random.default_rng(seed)
    lines = []
    for index, total in enumerate(totals):
        weights = np.eye(num_workers)[index % num_workers]
        if index % 3:
            weights = rng.random(num_workers) * (rng.random(num_workers) < 0.7)
        if weights.sum() == 0:
            weights = np.ones(num_workers)
        quotas = rng.multinomial(total, weights / weights.sum()).tolist()
        lines.append(json.dumps({"quotas": quotas, "microbatches_done": quotas}))
    path.write_text("\n".join(lines) + "\n")
    return [json.loads(line)["quotas"] for line in lines]


SGD = optax.sgd(0.3, momentum=0.9)
QUIET = {"progress": False, "raise_on_interrupt": False, "cluster": {"num_workers": 4}}


def fit(examples, weights, /, *, loss_fn=softmax_loss, optimizer=None, **fields):
    """`hetjax.fit` on four workers, quietly; after Ctrl-C it returns."""
    fields = {"microbatch_size": 4, "budget": 8, **QUIET, **fields}
    return hetjax.fit(loss_fn, weights, optimizer or SGD, examples, **fields)


def given(num_examples=64, dtype=None):
    """Examples, and weights to begin with; of float64 where JAX has it."""
    dtype = dtype or (np.float64 if jax.config.jax_enable_x64 else np.float32)
    return classification(num_examples, dtype), initial_weights(dtype)


def train(num_examples=64, /, **fields):
    """`fit` on what `given` gives."""
    return fit(*given(num_examples), **fields)


def run(examples=64, weights=None, /, *, loss_fn=softmax_loss, optimizer=SGD, **fields):
    """`hetjax.Run` with the fields of `fit`; of so many examples, or of these."""
    if isinstance(examples, int):
        examples = given(examples)[0]
    weights = given()[1] if weights is None else weights
    fields = {"microbatch_size": 4, "budget": 8, "cluster": {"num_workers": 4}, **fields}
    return hetjax.Run(loss_fn, weights, optimizer, examples, **fields)


def scripted(counts):
    """A policy of the same quotas in each round."""
    return quota.QuotaPolicy(
        lambda workers, budget: 0,
        lambda state, total, caps: (np.array(counts), state),
        lambda state, times: state,
    )


def own_step(ids, data, weights, optimizer, *, loss_fn=softmax_loss, rule=None, **options):
    """`(step, state, microbatches)` of `make_train_step`; ids i[W, M, B] of what each could do."""
    mesh, ids = hetjax.make_worker_mesh(len(ids)), ids.astype(np.int32)
    options = {"nominal_examples": ids.size, "rule": rule, **options}
    step = hetjax.make_train_step(loss_fn, optimizer, mesh, **options)
    more = {"mesh": mesh, "rule": rule, "observer": step.observer}
    state = hetjax.make_train_state(weights, optimizer, num_workers=len(ids), **more)
    examples = jax.tree.map(lambda leaf: leaf[ids], data)
    return step, state, hetjax.Microbatch(ids, np.ones(ids.shape, np.float32), examples)
