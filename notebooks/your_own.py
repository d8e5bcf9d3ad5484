# %% [markdown]
# # Your own model, your own quota policy
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/your_own.ipynb)
#
# hetjax trains any function of parameters and examples, and takes any rule that divides the work.
# Here you write both: a network in plain JAX, and a policy of your own. You try the policy in the
# simulator first, which takes no training, and then train with it.
#
# At the end you see your policy beside hetjax's own: in the simulator, in training, and where it
# fails.

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
# ## A policy of your own
#
# A *round* is what happens between two updates. The *quota* of a worker is how many microbatches
# it computes in a round; together they make the *budget*. A policy is three functions. None of
# them changes anything; state goes in and comes out.
#
# - `init(num_workers, budget)` returns the state before the first round.
# - `assign(state, total, caps)` returns the quotas of the next round and a state. They sum to
#   `total`, and none is above its worker's cap.
# - `observe(state, times)` takes in how long the workers took.
#
# The rule here is simple: after each round one microbatch goes from the worker that took longest
# to the one that was done first. It knows no model of cost. It only looks who was last.

# %%
import itertools

from hetjax import quota, simulate


def one_at_a_time():
    def init(num_workers, budget):
        return quota.largest_remainder(np.ones(num_workers), budget)  # equal split

    def assign(state, total, caps):
        if state.sum() == total and (state <= caps).all():
            return state, state
        # A smaller round, at the end of an epoch: in the same proportions, for once.
        return quota.largest_remainder(np.maximum(state, 1) * (caps > 0), total, caps=caps), state

    def observe(state, times):
        secs = np.where(times.microbatches_done > 0, times.compute_secs, 0.0)
        if times.microbatches_done.sum() < state.sum():
            return state  # of a smaller round nothing is learnt
        last, first = int(np.argmax(secs)), int(np.argmin(secs))
        moved = state.copy()
        moved[last] -= 1
        moved[first] += 1
        return moved

    return quota.QuotaPolicy(init=init, assign=assign, observe=observe)


# %% [markdown]
# ## In the simulator first
#
# The cluster: four workers at the speeds 6:4:4:2, with 2 % of noise, and the fastest is replaced
# in the middle by one three times as slow. No gradient is computed, so it takes a moment.

# %%
SEED = 0
BUDGET, NUM_ROUNDS, CHANGE = 32, 100, 50
cluster = {
    "secs_per_microbatch": (0.004, 0.006, 0.006, 0.012),
    "delay": "gamma",
    "delay_cv": 0.02,
    "changes": ({"round": CHANGE, "worker": 0, "secs_per_microbatch": 0.012},),
    "clock": "virtual",
    "seed": SEED,
}
POLICIES = {"equal": quota.equal(), "your own": one_at_a_time(), "adaptive": quota.adaptive()}
COLOURS = {"equal": "tab:red", "your own": "tab:green", "adaptive": "tab:blue"}


def simulated(policy, cluster):
    """The quotas of each round, and what each round took."""
    quotas = []
    run = simulate.simulate(
        policy,
        cluster,
        budget=BUDGET,
        num_rounds=NUM_ROUNDS,
        on_round=lambda done: quotas.append(done.quotas.copy()),
    )
    return np.array(quotas), run


def best_secs(secs):
    return quota.optimal_round_secs(quota.WorkerCosts(0.0, secs), BUDGET)


simulations = {name: simulated(policy, cluster) for name, policy in POLICIES.items()}
optimum = np.full(NUM_ROUNDS, best_secs((0.004, 0.006, 0.006, 0.012)))
optimum[CHANGE:] = best_secs((0.012, 0.006, 0.006, 0.012))

figure, panels = plt.subplots(1, 3, figsize=(12, 3.8))
for axes, name in zip(panels, ("your own", "adaptive")):
    for worker in range(4):
        quotas = simulations[name][0][:, worker]
        axes.step(range(NUM_ROUNDS), quotas, where="mid", label=f"worker {worker}")
    axes.set(title=f"quotas: {name}", xlabel="round", ylabel="quota (microbatches)", ylim=(0, 15))
panels[1].legend()
for name, (_, run) in simulations.items():
    panels[2].plot(1e3 * run.round_secs, color=COLOURS[name], label=name, linewidth=1.2)
panels[2].step(range(NUM_ROUNDS), 1e3 * optimum, "k--", where="mid", label="optimum")
panels[2].set(title="what a round takes", xlabel="round", ylabel="time (ms)", ylim=(0, None))
panels[2].legend()
plt.show()

# %% [markdown]
# Your policy finds its way, one microbatch a round, and after the change once more. Then it goes
# to and fro about the best quotas: it moves something after each round, needed or not. `adaptive`
# fits a cost to each worker and jumps to the best quotas after one round. After the change it
# takes a few rounds to be sure.

# %% [markdown]
# ## A model of your own
#
# Any function `(params, batch, rng) -> losses` will do, with one loss an example. This one is a
# small network in plain JAX that learns a spiral.


# %%
def spiral(num_examples, seed):
    draw = np.random.default_rng(seed)
    label = draw.integers(0, 2, num_examples)
    radius = draw.uniform(0.2, 1.0, num_examples)
    angle = 8 * radius + np.pi * label
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += draw.normal(0, 0.03, points.shape)
    return {"x": points.astype(np.float32), "y": label.astype(np.int32)}


def logits(params, x):
    for weights, bias in params[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    weights, bias = params[-1]
    return x @ weights + bias


def own_loss(params, batch, rng):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["x"]), batch["y"])


def first_params(sizes=(2, 64, 64, 2)):
    draw = np.random.default_rng(SEED)
    return [
        (draw.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32), np.zeros(m, np.float32))
        for n, m in itertools.pairwise(sizes)
    ]


runs = {}
for name, policy in POLICIES.items():
    runs[name] = hetjax.fit(
        own_loss,
        first_params(),
        optax.adam(5e-3),
        spiral(2048, SEED),
        epochs=25,  # of 4 rounds
        microbatch_size=16,
        budget=BUDGET,
        quota=policy,
        cluster=cluster,
        local=local_form(4),
        seed=SEED,
        progress=False,
    )

# %%
figure, panels = plt.subplots(1, 3, figsize=(12, 3.8))
grid = np.stack(np.meshgrid(*2 * [np.linspace(-1.2, 1.2, 150)]), axis=-1).astype(np.float32)
chance = jax.nn.softmax(logits(runs["your own"].params, grid))[..., 1]
points = spiral(400, SEED + 1)
panels[0].contourf(grid[..., 0], grid[..., 1], chance, 20, cmap="RdBu", alpha=0.7)
for label, colour in ((0, "tab:red"), (1, "tab:blue")):
    panels[0].scatter(
        *points["x"][points["y"] == label].T, s=7, color=colour, edgecolor="white", linewidth=0.3
    )
panels[0].set(
    title="what was learnt", xlabel="first feature", ylabel="second feature", aspect="equal"
)
for name, run in runs.items():
    ends = [report["start_secs"] + report["round_secs"] for report in run.history]
    panels[1].plot(
        ends, [report["loss"] for report in run.history], color=COLOURS[name], label=name
    )
    panels[2].bar(name, ends[-1], color=COLOURS[name])
    panels[2].plot(name, simulations[name][1].elapsed_secs[-1], "ko")
panels[2].plot([], [], "ko", label="simulated before")
panels[1].set(title="loss over time", xlabel="emulated time (s)", ylabel="training loss of a round")
panels[2].set(title="the whole training", ylabel="emulated time (s)")
panels[1].legend()
panels[2].legend()
plt.show()

# %% [markdown]
# The bars are what the training took, the dots are what the simulator said. They agree, since
# policy and delays are the same. Your policy takes more time than `adaptive`, and much less than
# equal split.
#
# ## Where it is hard
#
# Before you trust a policy, try it where it is hard. That costs seconds. On the left the noise
# grows, on the right the number of workers, with 8 microbatches each in the mean. Speeds stay as
# they are.

# %%
SPEEDS = (0.004, 0.006, 0.006, 0.012)
NOISE, REPEATS = (0.01, 0.03, 0.1, 0.3, 1.0), (1, 4, 16, 64)
figure, (left, right) = plt.subplots(1, 2, sharey=True)
for name, policy in POLICIES.items():
    over_noise, over_workers = [], []
    for noise in NOISE:
        noisy = cluster | {"changes": (), "delay_cv": noise, "delay_per": "round"}
        _, run = simulated(policy, noisy)
        over_noise.append(run.round_secs.mean() / best_secs(SPEEDS))
    for repeat in REPEATS:
        many = cluster | {"changes": (), "secs_per_microbatch": SPEEDS * repeat}
        run = simulate.simulate(policy, many, budget=BUDGET * repeat, num_rounds=NUM_ROUNDS)
        over_workers.append(run.round_secs.mean() / best_secs(SPEEDS))
    left.plot(NOISE, over_noise, "o-", color=COLOURS[name], label=name)
    right.plot(np.array(REPEATS) * 4, over_workers, "o-", color=COLOURS[name])
for axes in (left, right):
    axes.axhline(1, color="black", linestyle="--")
left.set(title="more and more noise", xlabel="noise (standard deviation / mean)", xscale="log")
left.set(ylabel="mean round / optimum", ylim=(0, None))
right.set(title="more and more workers", xlabel="workers", xscale="log")
left.legend()
plt.show()

# %% [markdown]
# - Against noise the simple rule holds its own. The more noise there is, the less a time says
#   about the next one, and the less any policy gains over equal split.
# - With many workers it fails. It moves one microbatch a round, so it needs as many rounds as
#   there are microbatches to move. `adaptive` moves all of them at once.

# %% [markdown]
# ## Try this
#
# 1. In `observe`, move nothing where `secs.max() < 1.1 * secs.min()`. Expect quieter quotas: look
#    at the simulator's picture before you train.
# 2. Start from `quota.largest_remainder((6, 4, 4, 2), budget)` in `init`. Expect no way to go in
#    the first rounds, and the same as before after the change.
# 3. Let a worker leave: `"changes": ({"round": 50, "worker": 3, "present": False},)`. Expect your
#    policy to go astray, since it hands work to the worker that took the least time, which is the
#    one that is not there. `times.present` says who is there: mend it.
