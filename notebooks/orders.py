# %% [markdown]
# # Example orders: a walk in the plane
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/orders.ipynb)
#
# In which order does an epoch go through the examples? Mostly at random. But each example pulls
# the parameters in a direction of its own. If examples that pull in opposite directions come close
# together, every part of an epoch pulls nearly where the whole epoch does. An order that is made
# so, from the gradients of the epoch before, is called *balanced*.
#
# At the end you see each order as a walk in the plane, how far each walk strays, and how many
# epochs each order needs to a loss.

# %%
# Installs hetjax where it is missing, and says which devices there are.
import importlib.util
import shutil

if importlib.util.find_spec("hetjax") is None:
    from IPython import get_ipython

    wanted = "hetjax@git+https://github.com/hetjax/hetjax"
    wanted += " jax[cuda12]" if shutil.which("nvidia-smi") else ""
    get_ipython().run_line_magic("pip", f"install -q {wanted}")

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import hetjax

devices = jax.devices()


def local_form(num_workers):
    """A device for each worker where there are as many; else one plays all of them."""
    return "stepped" if 1 < num_workers <= len(devices) else "virtual"


look = {"figure.figsize": (10, 3.6), "figure.dpi": 100, "figure.constrained_layout.use": True}
look |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
plt.rcParams.update(look)
print(f"hetjax {hetjax.__version__}, JAX {jax.__version__}")
print(f"{len(devices)} device(s), {devices[0].device_kind}; four workers: {local_form(4)}")

# %% [markdown]
# ## A model with two parameters
#
# 1,024 points in the plane have labels 0 and 1. Logistic regression with two weights learns them.
# A gradient then has two numbers, and can be drawn.

# %%
SEED = 0
NUM_EXAMPLES, NUM_WORKERS, MICROBATCH_SIZE, EPOCHS = 1024, 4, 4, 12
rng = np.random.default_rng(SEED)
x = (rng.normal(size=(NUM_EXAMPLES, 2)) * (1.0, 0.6)).astype(np.float32)
chances = 1 / (1 + np.exp(-x @ (1.5, -1.0)))
data = {"x": x, "y": (rng.random(NUM_EXAMPLES) < chances).astype(np.float32)}


def loss_fn(weights, batch, rng):
    return optax.sigmoid_binary_cross_entropy(batch["x"] @ weights, batch["y"])


def mean_loss(weights):
    """Over all examples, on the host, in float64: differences will be tiny."""
    logits = x @ np.asarray(weights, np.float64)
    return np.mean(np.logaddexp(0, logits) - data["y"] * logits)


def centred_gradients(weights):
    """Of each example, less the mean of all: f[NUM_EXAMPLES, 2]."""
    gradients = (1 / (1 + np.exp(-x @ weights)) - data["y"])[:, None] * x
    return gradients - gradients.mean(axis=0)


best = np.zeros(2)
for _ in range(20):  # Newton's method
    chances = 1 / (1 + np.exp(-x @ best))
    hessian = (x * (chances * (1 - chances))[:, None]).T @ x
    best -= np.linalg.solve(hessian, x.T @ (chances - data["y"]))

example_gradients = centred_gradients(np.zeros(2))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
for label, colour in ((0, "tab:blue"), (1, "tab:red")):
    ours = data["y"] == label
    left.scatter(*x[ours].T, s=6, color=colour, label=f"label {label}")
    right.scatter(*example_gradients[ours].T, s=6, color=colour)
left.set(title="examples", xlabel="first feature", ylabel="second feature")
right.set(
    title="their gradients, less the mean",
    xlabel="by the first weight",
    ylabel="by the second weight",
)
left.legend()
plt.show()

# %% [markdown]
# ## Four orders
#
# - `random_reshuffling` draws a new order for each epoch.
# - `block_reshuffling` shuffles blocks of examples, and goes backwards through every second epoch.
# - `pair_balance` balances pairs of examples, each worker by itself.
# - `d_grab` does that too, and then balances the workers' sums against each other.
#
# Four workers take 4 examples each, so a round has 16. `hetjax.Run` goes round by round. So we can
# look at the order when an epoch begins.

# %%
ORDERS = {
    "random_reshuffling": "tab:red",
    "block_reshuffling": "tab:orange",
    "pair_balance": "tab:blue",
    "d_grab": "tab:green",
}


def walk(weights, order):
    """Where the sum of the centred gradients is after each round of an epoch: f[rounds + 1, 2]."""
    steps = (
        centred_gradients(weights)[order].reshape(-1, NUM_WORKERS * MICROBATCH_SIZE, 2).sum(axis=1)
    )
    return np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])


def trained(method, rate=1.0):
    """The loss above the least one, and the walk, at the beginning of each epoch."""
    with hetjax.Run(
        loss_fn,
        np.zeros(2, np.float32),
        optax.sgd(rate),
        data,
        workers=NUM_WORKERS,
        local=local_form(NUM_WORKERS),
        microbatch_size=MICROBATCH_SIZE,
        budget=NUM_WORKERS,
        quota="equal",
        ordering=method,
        seed=SEED,
    ) as run:
        state, gaps, walks = run.init(), [], []
        for _ in range(EPOCHS):
            weights, _ = run.params(state)
            order = state.stream.passes[0].remaining.copy()  # of the epoch that begins
            gaps.append(mean_loss(weights) - mean_loss(best))
            walks.append(walk(weights, order))
            for _ in range(NUM_EXAMPLES // (NUM_WORKERS * MICROBATCH_SIZE)):
                state, _ = run.round(state)
    return gaps, walks


results = {method: trained(method) for method in ORDERS}

# %% [markdown]
# ## The walk of an epoch
#
# Take a step along the gradient of each example, less the mean of all. At the end of the epoch the
# sum is 0, for any order: the walk comes home. How far it strays on the way is the *herding
# bound*, the radius of the circle.

# %%
figure, panels = plt.subplots(2, 4, figsize=(12, 6.2), sharex=True, sharey=True)
for row, epoch in zip(panels, (1, EPOCHS - 1)):
    for axes, (method, colour) in zip(row, ORDERS.items()):
        path = results[method][1][epoch]
        bound = np.linalg.norm(path, axis=1).max()
        axes.plot(*path.T, color=colour, linewidth=1)
        axes.plot(0, 0, "k+")
        axes.add_patch(plt.Circle((0, 0), bound, fill=False, color="grey", linestyle=":"))
        axes.set(title=f"{method}\nepoch {epoch}, bound {bound:.1f}", aspect="equal")
for axes in panels[-1]:
    axes.set_xlabel("by the first weight")
for axes in panels[:, 0]:
    axes.set_ylabel("by the second weight")
plt.show()

# %% [markdown]
# The first row is the second epoch, for which one epoch of gradients is known. In the second row a
# balanced order has been made better epoch by epoch. Its walk stays at home. The walk of a random
# order is as long as ever.

# %%
figure, (left, right) = plt.subplots(1, 2)
for method, colour in ORDERS.items():
    gaps, walks = results[method]
    left.semilogy(
        [np.linalg.norm(path, axis=1).max() for path in walks], "o-", color=colour, label=method
    )
    right.semilogy(gaps, "o-", color=colour, label=method)
left.set(title="how far the walk strays", xlabel="epoch", ylabel="herding bound (2-norm)")
right.set(title="what that is good for", xlabel="epochs done", ylabel="loss above the least one")
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# The learning rate is large and constant. So with a random order the loss soon stops falling: each
# epoch throws the parameters about, by as much as its walk strays. With a balanced order it goes
# on falling.
#
# ## Does it help?
#
# Two parameters and 1,024 examples are the best case. Sums of N vectors in d directions cannot be
# kept much below √(d / N) of what a random order gives. Here is logistic regression on the digits:
# 650 parameters, 1,438 examples.

# %%
from hetjax.zoo.builders import digits

train, _ = digits.arrays()
flat = {"x": train["image"].reshape(-1, 64), "y": train["label"]}
begin = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}


def digits_loss(params, batch, rng):
    logits = batch["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


curves = {}
for method in ("random_reshuffling", "d_grab"):
    run = hetjax.fit(
        digits_loss,
        begin,
        optax.sgd(0.5),
        flat,
        eval_source=flat,
        epochs=15,
        workers=NUM_WORKERS,
        local=local_form(NUM_WORKERS),
        microbatch_size=MICROBATCH_SIZE,
        budget=NUM_WORKERS,
        quota="equal",
        ordering=method,
        seed=SEED,
        progress=False,
    )
    curves[method] = [report["eval"]["test_loss"] for report in run.history if report.get("eval")]

figure, (left, right) = plt.subplots(1, 2)
for method, losses in curves.items():
    left.plot(np.arange(1, 16), losses, "o-", color=ORDERS[method], label=method)
left.set(title="digits: loss over all training examples", xlabel="epochs done", ylabel="loss")
left.legend()
targets = np.linspace(curves["random_reshuffling"][1], curves["random_reshuffling"][-1], 30)
for method, losses in curves.items():
    reached = np.array(losses) <= targets[:, None]
    epochs = np.where(reached.any(axis=1), 1 + reached.argmax(axis=1), np.nan)
    right.step(targets, epochs, color=ORDERS[method], label=method)
right.set(title="digits: epochs to a loss", xlabel="loss", ylabel="epochs")
right.invert_xaxis()
plt.show()

# %% [markdown]
# Nothing much is gained here. The loss is still falling, and it is the number of updates that
# limits it, not their noise. A step with `d_grab` costs more, too. So balanced orders are worth a
# try where the loss has stopped falling at a rate that you do not want to lower, where the model
# is nearly convex, and where there are more examples than directions in which gradients differ.

# %% [markdown]
# ## Try this
#
# 1. Call `trained(method, rate=0.05)`. Updates are small, so the noise is too: expect all curves
#    of the loss to be the same, though the walks are as different as before.
# 2. Put `"shuffle_once": "tab:purple"` into `ORDERS`, one random order for all epochs. Expect a
#    bound that stays where it is.
# 3. Put `"d_grab_exact": "tab:brown"` into `ORDERS`. It takes the gradient of every example.
#    Expect the same picture as that of `d_grab`, which needs none of them, and more time.
