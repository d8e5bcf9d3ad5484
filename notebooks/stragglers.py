# %% [markdown]
# # Stragglers: rounds that do not wait
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/stragglers.ipynb)
#
# Eight workers are equally fast, but each of them is held up at random, now and then. Quotas
# cannot help: nobody knows beforehand who will be late. A *gate* can. It closes a round before all
# work is done. What was not begun goes back to the head of the order, so no example is lost or
# done twice.
#
# At the end you see how long training takes to a loss with each gate, beside what the simulator
# predicted before anything was trained.

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
# ## Where a gate closes
#
# A worker needs 10 ms for a *microbatch*, the work of one call, in the mean. In each round half of
# its time is fixed, and the other half is random (exponential): most rounds take it less than the
# mean, a few take it much longer. Each worker gets 4 microbatches. A *round* is what happens
# between two updates.

# %%
from hetjax import gates, simulate
from hetjax.cluster import emulate

SEED = 0
NUM_WORKERS, BUDGET, MICROBATCH_SIZE = 8, 32, 4
cluster = {
    "secs_per_microbatch": (0.010,) * NUM_WORKERS,
    "delay": "shifted_exponential",
    "delay_per": "round",
    "clock": "virtual",
    "seed": SEED,
}
GATES = {
    "none": gates.none(),
    "quorum": gates.quorum(24),  # 24 of 32 microbatches are done
    "deadline": gates.deadline(0.040),  # 40 ms, the mean time of a quota
    "first": gates.first(),  # the first worker has done its quota
}
COLOURS = {"none": "tab:red", "quorum": "tab:blue", "deadline": "tab:green", "first": "tab:orange"}

# %%
quotas = np.full(NUM_WORKERS, BUDGET // NUM_WORKERS)
ends = emulate.ends_of(emulate.as_cluster(cluster), 0, quotas)  # of each microbatch in round 0

figure, panels = plt.subplots(1, 4, figsize=(12, 3.4), sharex=True, sharey=True)
for axes, (name, gate) in zip(panels, GATES.items()):
    closing = gates.close(gate, ends, quotas)
    for worker in range(NUM_WORKERS):
        starts = np.concatenate([[0], ends[worker, :-1]])
        for k in range(closing.microbatches_done[worker]):
            length = ends[worker, k] - starts[k]
            axes.barh(
                worker, 1e3 * length, left=1e3 * starts[k], color=COLOURS[name], edgecolor="white"
            )
    axes.axvline(1e3 * closing.round_secs, color="black")
    done = int(closing.microbatches_done.sum())
    axes.set(title=f"{name}: {done} of {BUDGET}", xlabel="time (ms)")
panels[0].set_ylabel("worker")
plt.show()

# %% [markdown]
# Each box is a microbatch. The black line is the end of the round. Without a gate it is where the
# last worker is done. With a gate, what is computing when the gate closes is still finished and
# counts. A gate makes the round shorter, and smaller: fewer examples are in the update.

# %% [markdown]
# ## What the simulator predicts
#
# The simulator plays rounds on such a cluster without any model: the policy, the gate and the
# delays are those of training. Two numbers matter: how many *updates* a second there are, and how
# many *examples* a second.

# %%
predicted = {}
for name, gate in GATES.items():
    predicted[name] = simulate.simulate("equal", cluster, budget=BUDGET, num_rounds=300, gate=gate)

figure, (left, right) = plt.subplots(1, 2)
for name, run in predicted.items():
    left.bar(name, len(run.round_secs) / run.elapsed_secs[-1], color=COLOURS[name])
    right.bar(name, run.microbatches_per_sec * MICROBATCH_SIZE, color=COLOURS[name])
left.set(title="simulated: updates", ylabel="updates / s")
right.set(title="simulated: examples", ylabel="examples / s")
plt.show()

# %% [markdown]
# ## Training with each gate
#
# Now the same by training: the digits that come with hetjax, a small network, and the loss on the
# test images after every 5 rounds.

# %%
from flax import nnx

from hetjax.zoo.builders import digits

train, test = digits.arrays()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, image):
        return self.out(nnx.relu(self.hidden(image.reshape(-1, 64))))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


loss_fn, params = hetjax.nnx_loss(Net(nnx.Rngs(SEED)), loss)
runs = {}
for name, gate in GATES.items():
    runs[name] = hetjax.fit(
        loss_fn,
        params,
        optax.sgd(0.1, momentum=0.9),
        train,
        eval_source=test,
        eval_every_rounds=5,
        epochs=8,
        microbatch_size=MICROBATCH_SIZE,
        budget=BUDGET,
        seed=SEED,
        quota="equal",
        gate=gate,
        cluster=cluster,
        local=local_form(NUM_WORKERS),
        progress=False,
    )

# %%
TARGET = 0.4


def evaluated(run):
    """Rounds, examples and seconds so far, and the test loss, at each evaluation."""
    rows = [
        (
            r["round"] + 1,
            r["examples_processed"],
            r["start_secs"] + r["round_secs"],
            r["eval"]["test_loss"],
        )
        for r in run.history
        if r.get("eval")
    ]
    return np.array(rows).T


figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
for name, run in runs.items():
    for place, over in zip(axes, evaluated(run)[:3]):
        place.plot(over, evaluated(run)[3], color=COLOURS[name], label=name)
for place, over in zip(axes, ("updates", "examples", "emulated time (s)")):
    place.axhline(TARGET, color="grey", linestyle=":")
    place.set(xlabel=over, title=f"over {over}")
axes[0].set_ylabel("test loss")
axes[2].legend(title="gate")
plt.show()

# %% [markdown]
# Over updates the curves are nearly one: here an update of fewer examples is as good. So over
# examples the gates that make small rounds are ahead, and over time all gates are.
#
# ## Time to a loss, against the prediction
#
# The run without a gate says how many updates, and how many examples, the loss takes. The
# simulator says how fast a gate makes them. So there are two predictions. The dot holds if updates
# count. The ring holds if examples count, as they do where batches are small and gradients are
# noisy.


# %%
def at_target(run):
    """Updates, examples and seconds when the test loss is at the target for the first time."""
    rows = evaluated(run)
    k = int(np.argmax(rows[3] <= TARGET))
    part = (rows[3, k - 1] - TARGET) / (rows[3, k - 1] - rows[3, k])  # between two evaluations
    return rows[:3, k - 1] + part * (rows[:3, k] - rows[:3, k - 1])


updates, examples, _ = at_target(runs["none"])
figure, axes = plt.subplots(figsize=(10, 3.2))
for row, (name, run) in enumerate(predicted.items()):
    axes.barh(name, at_target(runs[name])[2], color=COLOURS[name], height=0.6)
    by_updates = updates * run.elapsed_secs[-1] / len(run.round_secs)
    by_examples = examples / (run.microbatches_per_sec * MICROBATCH_SIZE)
    axes.plot(by_examples, row, "o", color="black", markersize=10, fillstyle="none")
    axes.plot(by_updates, row, "o", color="black", markersize=6)
axes.plot([], [], "o", color="black", label="predicted, if updates count")
axes.plot([], [], "o", color="black", fillstyle="none", label="predicted, if examples count")
axes.set(title=f"to a test loss of {TARGET}", xlabel="emulated time (s)")
axes.invert_yaxis()
axes.legend()
plt.show()

# %% [markdown]
# The bars are measured, in training. They lie near the marks, within a fifth or so. There are two
# reasons for the rest.
#
# - The simulator knows no epochs. In training no gate closes the round that ends an epoch, so that
#   an epoch does not end in crumbs. These rounds wait for all.
# - A loss is noisy. One run reaches the target an evaluation sooner than another.

# %% [markdown]
# ## Try this
#
# 1. Set `"delay"` to `"constant"`. Nobody is ever late: expect all gates but `quorum` to do the
#    same as none. `quorum` makes smaller rounds without need.
# 2. Set `"delay_per"` to `"microbatch"`. Each microbatch is late by itself, and within a round
#    that averages out: expect the gates to gain less.
# 3. Set the first entry of `"secs_per_microbatch"` to `0.040` and `quota` to `"adaptive"`, here
#    and in `simulate`. Quotas even out the lasting difference, gates the random rest. Expect them
#    to gain more together than either alone.
