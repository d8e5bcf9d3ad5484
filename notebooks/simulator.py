# %% [markdown]
# # The simulator: 8 to 100,000 workers
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/simulator.ipynb)
#
# How would a policy do on a cluster that nobody has? `hetjax.simulate` plays rounds without a
# model and without gradients. The policies, the exact solver and the gates are those of training.
# So what you see here in seconds is what a run would do with its quotas.
#
# At the end you see four policies against the optimum, on 8 to 100,000 workers, and what a gate
# adds.

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
# ## One simulation
#
# Eight workers share 64 *microbatches*, pieces of work of one size, in each *round*. The *quota*
# of a worker is how many of them it gets. Their speeds differ by up to a factor of 4, and their
# times are noisy, by 10 %. From round 60 on worker 0 takes twice as long. A simulation shows a
# picture of itself as the last line of a cell.

# %%
import time

from hetjax import quota, simulate

SEED = 0
rng = np.random.default_rng(SEED)
POLICIES = ("equal", "proportional", "dead_band", "adaptive")
COLOURS = dict(zip(POLICIES, ("tab:red", "tab:orange", "tab:green", "tab:blue")))
ROUNDS, CHANGE = 120, 60


def seconds(num_workers):
    """Of a microbatch, of each worker: from 0.05 to 0.2 s."""
    return 0.1 / rng.uniform(0.5, 2.0, num_workers)


secs = seconds(8)
cluster = {
    "secs_per_microbatch": secs,
    "delay": "gamma",
    "delay_cv": 0.1,
    "changes": ({"round": CHANGE, "worker": 0, "secs_per_microbatch": 2 * secs[0]},),
    "seed": SEED,
}
runs = {}
for policy in POLICIES:
    runs[policy] = simulate.simulate(policy, cluster, budget=64, num_rounds=ROUNDS)
runs["adaptive"]

# %% [markdown]
# ## Policies against the optimum
#
# - `equal` gives all workers the same: plain data parallelism.
# - `proportional` measures speeds and divides the work in proportion.
# - `dead_band` does so too, but ignores changes of less than 20 %.
# - `adaptive` is hetjax's own. It fits what a round would take with any quotas, and solves for the
#   best.
#
# Where the mean times are known, the solver finds the exact optimum.

# %%
slower = np.where(np.arange(8) == 0, 2.0, 1.0)
best = np.empty(ROUNDS)
best[:CHANGE] = quota.optimal_round_secs(quota.WorkerCosts(0.0, secs), 64)
best[CHANGE:] = quota.optimal_round_secs(quota.WorkerCosts(0.0, slower * secs), 64)

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), width_ratios=(5, 3))
for policy, run in runs.items():
    left.plot(run.round_secs, color=COLOURS[policy], label=policy, linewidth=1.2)
    ratio = run.round_secs.sum() / best.sum()
    right.bar(policy, ratio, color=COLOURS[policy])
    right.text(policy, ratio, f"{ratio:.2f}", ha="center", va="bottom")
left.step(range(ROUNDS), best, color="black", linestyle="--", where="mid", label="optimum")
left.axvline(CHANGE, color="grey", linestyle=":")
left.set(title="what a round takes", xlabel="round", ylabel="time (s)", ylim=(0, None))
right.axhline(1, color="black", linestyle="--")
right.tick_params("x", rotation=20)
right.set(title="whole run over the optimum", ylabel="time / optimum")
left.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# The optimum is that of the mean times. No policy can be below it for long. In a run as short as
# this the plain rule is nearly as good as `adaptive`. What keeps the good ones above it is the
# first round, the change, and the noise: a round lasts until its last worker is done.
#
# ## From 8 to 100,000 workers
#
# The same with more and more workers, each with 8 microbatches a round in the mean. No speed
# changes.

# %%
SIZES = (8, 100, 1_000, 10_000, 100_000)
WARM, MEASURED = 5, 15
ratios, waiting, took = ({policy: [] for policy in POLICIES} for _ in range(3))
for num_workers in SIZES:
    secs = seconds(num_workers)
    many = {"secs_per_microbatch": secs, "delay": "gamma", "delay_cv": 0.1, "seed": SEED}
    optimum = quota.optimal_round_secs(quota.WorkerCosts(0.0, secs), 8 * num_workers)
    for policy in ("equal", "proportional", "adaptive"):
        began = time.perf_counter()
        run = simulate.simulate(
            policy,
            many,
            budget=8 * num_workers,
            num_rounds=WARM + MEASURED,
            caps=np.full(num_workers, 64),  # keeps the arrays small
        )
        took[policy].append(time.perf_counter() - began)
        ratios[policy].append(run.round_secs[WARM:].mean() / optimum)
        waiting[policy].append(100 * run.waiting_fraction[WARM:].mean())

figure, panels = plt.subplots(1, 3, figsize=(12, 3.8))
for policy in ("equal", "proportional", "adaptive"):
    for axes, of in zip(panels, (ratios, waiting, took)):
        axes.plot(SIZES, of[policy], "o-", color=COLOURS[policy], label=policy)
panels[0].set(title="mean round over the optimum", ylabel="time / optimum", ylim=(0.9, None))
panels[0].axhline(1, color="black", linestyle="--")
panels[1].set(title="waiting", ylabel="share of the workers' time (%)", ylim=(0, None))
panels[2].set(title=f"{WARM + MEASURED} rounds took the simulator", ylabel="time (s)", yscale="log")
for axes in panels:
    axes.set(xlabel="workers", xscale="log")
panels[0].legend()
plt.show()

# %% [markdown]
# - Under equal split half of the time or more is waiting, and a round takes more than twice the
#   optimum.
# - From 100 workers on adaptive quotas are the nearest to the optimum. With 8 the plain rule is
#   about as good.
# - With more workers all are farther from the optimum: among 100,000 noisy times there is always
#   one that is far too long. No quotas can help against that.
#
# ## What a gate adds
#
# Now each worker is held up at random, for as long as it computes in the mean. A gate closes a
# round early, and what was not begun goes back. `first` closes when the first worker has done its
# quota, `quorum` when three quarters of all microbatches are done. Rounds then differ in size. So
# it is *throughput* that counts: microbatches a second, here over those of equal split without a
# gate.

# %%
from hetjax import gates

figure, axes = plt.subplots(figsize=(9, 3.8))
throughput = {}
for num_workers in SIZES[:-1]:
    secs = seconds(num_workers)
    late = {"secs_per_microbatch": secs, "delay": "shifted_exponential", "delay_per": "round"}
    choices = {
        "none": gates.none(),
        "first": gates.first(),
        "quorum": gates.quorum(6 * num_workers),
    }
    for name, gate in choices.items():
        for policy in ("equal", "adaptive"):
            run = simulate.simulate(
                policy,
                late | {"seed": SEED},
                budget=8 * num_workers,
                num_rounds=40,
                caps=np.full(num_workers, 64),
                gate=gate,
            )
            done = run.microbatches_done[10:].sum() / (run.elapsed_secs[-1] - run.elapsed_secs[9])
            throughput.setdefault((name, policy), []).append(done)
looks = {"none": ("tab:red", "s"), "first": ("tab:orange", "^"), "quorum": ("tab:blue", "o")}
for (name, policy), done in throughput.items():
    gain = np.array(done) / throughput["none", "equal"]
    colour, marker = looks[name]
    dashes = "-" if policy == "adaptive" else "--"
    label = f"gate {name}, {policy}"
    axes.plot(SIZES[:-1], gain, color=colour, marker=marker, linestyle=dashes, label=label)
axes.set(title="workers that are held up at random", xlabel="workers", xscale="log")
axes.set(ylabel="throughput over equal, no gate", ylim=(0, None))
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# - Without a gate the worker that is held up longest decides. The more workers there are, the
#   longer that is, and the more there is to gain.
# - `quorum` gains more and more.
# - `first` is good for few workers. Among 10,000 the first one is so early that the round ends
#   before most of the others have begun a second microbatch. With adaptive quotas it is then no
#   better than no gate at all.

# %% [markdown]
# ## Try this
#
# 1. Set `"delay"` of `cluster` to `"constant"`. Expect `adaptive` to lie on the dashed line, but
#    for the first round, the change, and now and then a round of equal split, by which it tests
#    itself.
# 2. Set `"delay_cv"` to `0.5`. Expect all policies to be farther from the optimum, and `adaptive`
#    still the nearest, or nearly so.
# 3. Give `reducer="d_psgd"`, `param_bytes=100_000_000` and
#    `link=hetjax.topology.links.LinkModel(1e-4, 1.25e9)` to `simulate`, and look at
#    `run.exchange_secs`: how long the workers talk.
