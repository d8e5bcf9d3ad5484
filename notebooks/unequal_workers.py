# %% [markdown]
# # Unequal workers: who waits?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/unequal_workers.ipynb)
#
# Four workers train one model together. One of them is three times as slow as the fastest. In
# plain data parallelism each gets the same work, so the fast ones wait. hetjax measures the
# workers and gives each as much work as it can do in the time of the others.
#
# At the end you see who waits and who does not, what happens when a worker is replaced and when
# one joins, and how near the training time comes to the least that is possible.

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
# ## Data and a model
#
# The data are 1,438 handwritten digits of 8 × 8 pixels, which come with hetjax. The model is a
# small network in Flax NNX. The loss is an ordinary function. It returns one number an example.

# %%
from flax import nnx

from hetjax.zoo.builders import digits

SEED = 0
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

# %% [markdown]
# ## Equal split and adaptive quotas
#
# A *microbatch* is what a worker computes in one call, 8 examples here. A *round* is what happens
# between two updates. The *budget* is the number of microbatches of a round, 16, so that a batch
# has 128 examples. The *quota* of a worker is the number of microbatches that it gets.
#
# The speeds are emulated. Worker 3 takes 12 ms for a microbatch, worker 0 takes 4 ms. The clock
# only adds these times up. So you need no slow machine, and the numbers are the same everywhere.

# %%
SPEEDS = (0.004, 0.006, 0.006, 0.012)  # seconds a microbatch
COLOURS = {"equal": "tab:red", "adaptive": "tab:blue", "bound": "black"}
settings = {"epochs": 10, "microbatch_size": 8, "budget": 16, "seed": SEED, "progress": False}
cluster = {"secs_per_microbatch": SPEEDS, "clock": "virtual"}

runs = {}
for policy in ("equal", "adaptive"):
    runs[policy] = hetjax.fit(
        loss_fn,
        params,
        optax.adam(3e-3),
        train,
        quota=policy,
        cluster=cluster,
        local=local_form(4),
        **settings,
    )


# %%
def draw_rounds(axes, history):
    """A bar for what each worker computes in each round, and grey where it waits."""
    began = history[0]["start_secs"]
    for report in history:
        start = 1e3 * (report["start_secs"] - began)
        length = 1e3 * report["round_secs"]
        for worker, secs in enumerate(report["compute_secs"]):
            busy = 1e3 * secs
            axes.barh(worker, length, left=start, height=0.7, color="#dddddd")
            axes.barh(worker, busy, left=start, height=0.7, color=f"C{worker}", edgecolor="white")
            quota = report["quotas"][worker]
            axes.text(start + busy / 2, worker, quota, ha="center", va="center", color="white")
        axes.axvline(start + length, color="black", linewidth=0.8)
    axes.set_yticks(range(len(SPEEDS)), [f"worker {w}" for w in range(len(SPEEDS))])


figure, (left, right) = plt.subplots(1, 2, sharex=True, sharey=True)
draw_rounds(left, runs["equal"].history[:4])
draw_rounds(right, runs["adaptive"].history[:6])
left.set(title="equal split: 4 rounds", xlabel="time (ms)")
right.set(title="adaptive quotas: the first 6 rounds", xlabel="time (ms)")
plt.show()

# %% [markdown]
# Each bar is what a worker computes, and the number on it is its quota. Grey is waiting. A black
# line is an update.
#
# - Under equal split all wait for worker 3, in every round.
# - The first adaptive round is equal too, since nothing has been measured yet. After it the quotas
#   are 6 4 4 2. All workers finish together, and a round takes half the time.
#
# Both runs make the same updates of the same 128 examples a round. Only the time differs.

# %%
figure, (left, right) = plt.subplots(1, 2, width_ratios=(3, 2))
for shift, (policy, run) in zip((-0.2, 0.2), runs.items()):
    full = [report for report in run.history if report["full"]]  # an epoch's last round is small
    ends = [report["start_secs"] + report["round_secs"] for report in full]
    losses = [report["loss"] for report in full]
    left.plot(ends, losses, label=policy, color=COLOURS[policy])
    busy_secs = np.sum([report["compute_secs"] for report in run.history], axis=0)
    waits = 1 - busy_secs / sum(report["round_secs"] for report in run.history)
    right.bar(np.arange(4) + shift, 100 * waits, width=0.38, label=policy, color=COLOURS[policy])
left.set(title="the loss over time", xlabel="emulated time (s)", ylabel="training loss of a round")
right.set(title="who waits, in the whole run", ylabel="share of the time (%)")
right.set_xticks(range(4), [f"worker {worker}" for worker in range(4)])
left.legend()
right.legend()
plt.show()

pairs = zip(runs["equal"].history, runs["adaptive"].history)
most = max(abs(equal["loss"] - adaptive["loss"]) for equal, adaptive in pairs)
print(f"The losses of the two runs differ by at most {most:.0e}: rounding.")

# %% [markdown]
# ## A worker is replaced, another one joins
#
# Now the times are noisy, by 10 %. At round 40 worker 0 is replaced by a machine three times as
# slow. At round 80 a fifth worker joins, as fast as worker 0 was. Nobody tells the policy. It sees
# the seconds that the workers took, nothing else.

# %%
changing = {
    "secs_per_microbatch": (*SPEEDS, 0.004),
    "delay": "gamma",
    "delay_cv": 0.1,
    "clock": "virtual",
    "changes": (
        {"round": 0, "worker": 4, "present": False},  # is not there yet
        {"round": 40, "worker": 0, "secs_per_microbatch": 0.012},
        {"round": 80, "worker": 4, "present": True},
    ),
}
changed = {}
for policy in ("equal", "adaptive"):
    changed[policy] = hetjax.fit(
        loss_fn,
        params,
        optax.adam(3e-3),
        train,
        quota=policy,
        cluster=changing,
        local=local_form(5),
        **settings,
    )

# %%
figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(10, 6))
history = [report for report in changed["adaptive"].history if report["full"]]
rounds = [report["round"] for report in history]
for worker in range(5):
    quotas = [report["quotas"][worker] for report in history]
    upper.step(rounds, quotas, where="mid", label=f"worker {worker}", color=f"C{worker}")
upper.set(title="adaptive quotas", ylabel="quota (microbatches)")
upper.legend(loc="upper left", bbox_to_anchor=(1, 1))
for policy, run in changed.items():
    lengths = [1e3 * report["round_secs"] for report in run.history if report["full"]]
    lower.plot(rounds, lengths, color=COLOURS[policy], label=policy)
best = [1e3 * report["optimal_round_secs"] for report in history]
upper.set(ylim=(-0.3, 8))
lower.step(
    rounds, best, where="mid", color="black", linestyle="--", label="exact optimum\n(of mean times)"
)
lower.set(title="what a round takes", xlabel="round", ylabel="time (ms)", ylim=(0, 90))
lower.legend(loc="upper left", bbox_to_anchor=(1, 1))
for axes in (upper, lower):
    for place, text in ((40, "worker 0 replaced"), (80, "worker 4 joins")):
        axes.axvline(place, color="grey", linestyle=":")
        axes.text(place + 0.5, axes.get_ylim()[1], text, va="top", color="grey")
plt.show()

# %% [markdown]
# - The dashed line is the exact optimum: no quotas in whole microbatches have a shorter mean
#   round.
# - After each change the quotas follow within a few rounds. Worker 0 loses work when it becomes
#   slow. Worker 4 gets a small first quota, is measured, and then gets its share.
# - A peak of the adaptive line is a price: the round in which a change is met for the first time,
#   and now and then a few rounds of equal split. The policy tries these to see whether they would
#   be better.

# %% [markdown]
# ## Training time against the bound
#
# The bound is the sum of the optima of all rounds: the time of a policy that knows the mean of
# each worker, and each change, beforehand. No policy can know that.

# %%
figure, axes = plt.subplots(figsize=(10, 2.6))
bound = sum(report["optimal_round_secs"] or 0 for report in changed["adaptive"].history)
totals = {"bound": bound}
for policy in ("adaptive", "equal"):
    totals[policy] = sum(report["round_secs"] for report in changed[policy].history)
bars = axes.barh(list(totals), list(totals.values()), color=[COLOURS[name] for name in totals])
axes.bar_label(
    bars, [f"{secs:.2f} s, {secs / bound:.2f} × the bound" for secs in totals.values()], padding=4
)
axes.set(title="ten epochs", xlabel="emulated time (s)", xlim=(0, 1.25 * max(totals.values())))
plt.show()

# %% [markdown]
# What is left between adaptive quotas and the bound has two parts. One is learning: the peaks of
# the picture before. The other is noise: a round lasts until its slowest worker is done, and by
# chance one of them always is slower than its mean.
#
# A result shows a picture of itself where it is the last line of a cell.

# %%
changed["adaptive"]

# %% [markdown]
# ## Try this
#
# 1. Set `budget` to 5 with four workers. Quotas are whole numbers, so they cannot follow the
#    speeds any more: expect the optimum to be hardly better than equal split. Take at least 4
#    microbatches a worker.
# 2. Set `SPEEDS` to four equal numbers. Expect both policies to take the same time: where workers
#    are equal, hetjax gains nothing.
# 3. Add `"overhead_secs": (0, 0, 0, 0.02)` to `cluster`: worker 3 needs 20 ms in each round beside
#    its microbatches. Expect its quota to fall to 0, since a round is shorter without it.
