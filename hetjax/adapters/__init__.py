"""From a Flax model to the core's `loss_fn(params, batch, rng) -> losses f32[B]`, and back.

    def loss(model, batch):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    loss_fn, params = nnx_loss(model, loss)              # Flax NNX
    loss_fn, params = linen_loss(module, variables, loss)  # Flax Linen
    trained = nnx_model(model, params)
    loss_fn = per_example(one_example_loss)              # any function of one example

`loss` gets something that is called like the model, and returns one loss for each example (or
losses and weights, or a `hetjax.Losses`). It takes what it names: `rngs`, `rng`, `mask`. Parameters
are nested dicts of arrays, as optax and a checkpoint want them. With `wrt` only some of them are
trained, and the others are constants. Each call seeds random streams (dropout) afresh from its
`rng`, one key for the batch or one for each example. So the model passed in is never changed, and
trains in the mode in which it is. Other variables that are no parameters are constants.

State across examples is that of a `hetjax.StatefulLoss`. A model that changes other variables when
it is called, trained ones among them, is refused; this is checked whenever its loss is traced
(`forwarding`). `fits` checks what the adapters get.
"""
