"""Sentences of different lengths, a loss for each token."""

import numpy as np
import optax
from flax import nnx

import hetjax

hetjax.use_cpu_workers(4)

words = {
    word: i
    for i, word in enumerate(["<pad>", "the", "cat", "dog", "sat", "ran", "on", "a", "mat", "road"])
}
texts = [
    "the cat sat on a mat",
    "the dog ran",
    "a dog sat on the road",
    "the cat ran on a road",
] * 32
ids = np.zeros((len(texts), 8), np.int32)
for row, text in enumerate(texts):
    known = [words[word] for word in text.split()]
    ids[row, : len(known)] = known


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(words), 32, rngs=rngs)
        self.out = nnx.Linear(32, len(words), rngs=rngs)

    def __call__(self, ids):
        return self.out(nnx.relu(self.embed(ids)))


def loss(model, batch):
    logits, targets = model(batch["ids"][:, :-1]), batch["ids"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, (targets > 0).astype(np.float32)


loss_fn, params = hetjax.nnx_loss(Model(nnx.Rngs(0)), loss)
result = hetjax.fit(
    loss_fn, params, optax.adam(3e-2), {"ids": ids}, epochs=10, microbatch_size=4, budget=16
)
assert result.summary["train_loss"] < 1.2
