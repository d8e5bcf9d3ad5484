# %% [markdown]
# # Gossip: workers that talk to their neighbours alone
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/gossip.ipynb)
#
# In an all-reduce every worker gets the sum over all workers. With *gossip* each worker keeps its
# own copy of the parameters, a *replica*, and averages it with those of its neighbours alone. Less
# is sent, and the replicas differ. Which graph of neighbours is good?
#
# At the end you see ring, torus and MATCHA beside each other: their spectral gaps, how far their
# replicas are apart, and the loss over the bytes that were sent.

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
# ## Three ways to choose neighbours
#
# - On a *ring* each worker has two neighbours.
# - On a *torus*, a grid whose ends are joined, each has four.
# - *MATCHA* divides the links of a graph, here the torus, into matchings, and draws some of these
#   in each round. A *matching* is a set of links that have no worker in common. With budget 0.5
#   half of the links are used in the mean. With budget 1 all are used in each round, which makes
#   the plain ring and the plain torus.

# %%
from hetjax import topology

SEED = 0
NUM_WORKERS = 16
CHOICES = {"ring": ("ring", 1.0), "torus": ("torus", 1.0), "MATCHA": ("torus", 0.5)}
COLOURS = {"ring": "tab:green", "torus": "tab:blue", "MATCHA": "tab:orange", "all-reduce": "black"}

schedules = {}
for name, (graph_name, budget) in CHOICES.items():
    graph = topology.make_graph(graph_name, NUM_WORKERS)
    matchings = topology.decompose_matchings(graph.edges, NUM_WORKERS)
    schedules[name] = topology.matcha_schedule(matchings, NUM_WORKERS, budget)


def active_links(name, round, seed=SEED):
    schedule = schedules[name]
    flags = schedule.flags(round, seed)
    return [link for flag, links in zip(flags, schedule.matchings) if flag for link in links]


def draw_links(axes, links, title, colour):
    angles = 2 * np.pi * np.arange(NUM_WORKERS) / NUM_WORKERS
    x, y = np.cos(angles), np.sin(angles)
    for link in links:
        axes.plot(x[link], y[link], color=colour, linewidth=1.2)
    axes.scatter(x, y, s=160, color="white", edgecolor=colour, zorder=2)
    for worker in range(NUM_WORKERS):
        axes.text(x[worker], y[worker], worker, ha="center", va="center", fontsize=8)
    axes.set(title=title, aspect="equal")
    axes.axis("off")


figure, panels = plt.subplots(1, 4, figsize=(12, 3.4))
shown = [("ring", 0), ("torus", 0), ("MATCHA", 1), ("MATCHA", 2)]
for axes, (name, round) in zip(panels, shown):
    title = f"{name}, round {round}" if name == "MATCHA" else f"{name}, every round"
    draw_links(axes, active_links(name, round), title, COLOURS[name])
plt.show()

# %% [markdown]
# ## The spectral gap
#
# In a round each link moves its two workers towards each other. That multiplies the vector of the
# workers' values by a matrix W. The *spectral gap* is 1 minus the factor by which a round shrinks
# the distance to the mean, in the worst case. With a gap of 1 averages are exact. With a gap of 0
# the workers never come together.

# %%
gaps = {name: 1 - schedule.rho**0.5 for name, schedule in schedules.items()}  # ρ is of squares
rng = np.random.default_rng(SEED)
begin = rng.normal(size=(NUM_WORKERS, 200))  # 200 numbers a worker, at random
begin -= begin.mean(axis=0)


def averaging(name, num_rounds=40, num_draws=20):
    """The copies that a worker sent, and the distance to the mean over that at the beginning."""
    squares, copies = np.zeros(num_rounds), np.zeros(num_rounds)
    for draw in range(num_draws):
        values = begin
        for round in range(num_rounds):
            squares[round] += np.sum(values**2)
            links, matrix = active_links(name, round, SEED + draw), np.eye(NUM_WORKERS)
            for i, j in links:
                matrix[[i, j], [i, j]] -= schedules[name].alpha
                matrix[[i, j], [j, i]] += schedules[name].alpha
            values = matrix @ values
            copies[round + 1 :] += 2 * len(links) / NUM_WORKERS
    return copies / num_draws, np.sqrt(squares / squares[0])


figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6))
left.bar(list(gaps), list(gaps.values()), color=[COLOURS[name] for name in gaps])
left.set(title="spectral gap", ylabel="gap of a round")
for name in gaps:
    copies, distances = averaging(name)
    rounds = np.arange(len(distances))
    middle.semilogy(rounds, distances, color=COLOURS[name], label=name)
    middle.semilogy(rounds, (1 - gaps[name]) ** rounds, color=COLOURS[name], linestyle=":")
    right.semilogy(copies, distances, color=COLOURS[name], label=name)
middle.set(
    title="averaging random numbers", xlabel="round", ylabel="distance to the mean (relative)"
)
right.set(title="the same over what is sent", xlabel="copies sent by a worker", xlim=(0, 80))
for axes in (middle, right):
    axes.set(ylim=(1e-4, 1.5))
right.legend()
plt.show()

# %% [markdown]
# The dotted lines fall by the spectral gap. The whole lines fall at least as fast: the gap is the
# worst case. (The lines are the root of the mean square over 20 draws. In a single draw of MATCHA
# the distance may rise for a round.) A round of the torus brings the workers much nearer than one
# of the ring, and sends twice as much. A round of MATCHA sends as much as one of the ring, and
# brings them nearer.

# %% [markdown]
# ## Training
#
# The digits that come with hetjax. Each worker has a shard of its own, and takes large steps, so
# that the replicas move apart. All-reduce, which keeps them equal, is there to compare. In each
# round a worker takes its step, and then averages.

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
reducers = {name: topology.matcha(graph=g, budget=b) for name, (g, b) in CHOICES.items()}
reducers["all-reduce"] = topology.all_reduce()
runs = {}
for name, reducer in reducers.items():
    runs[name] = hetjax.fit(
        loss_fn,
        params,
        optax.sgd(0.5),
        train,
        eval_source=test,
        epochs=8,
        microbatch_size=4,
        budget=16,
        seed=SEED,
        data={"sharing": "private"},
        quota="equal",
        reducer=reducer,
        workers=NUM_WORKERS,
        local=local_form(NUM_WORKERS),
        progress=False,
    )

# %%
figure, panels = plt.subplots(1, 3, figsize=(12, 3.8))
for name, run in runs.items():
    megabytes = np.cumsum([report["bytes_sent"] for report in run.history]) / 1e6
    ends = [k for k, report in enumerate(run.history) if report.get("eval")]
    losses = [run.history[k]["eval"]["test_loss"] for k in ends]
    panels[1].plot(ends, losses, color=COLOURS[name], label=name)
    panels[2].plot(megabytes[ends], losses, color=COLOURS[name], label=name)
    if name != "all-reduce":
        apart = [100 * run.history[k]["consensus"]["relative"] for k in ends]
        panels[0].plot(ends, apart, color=COLOURS[name], label=name)
panels[0].set(
    title="how far replicas are apart", xlabel="round", ylabel="consensus distance (% of the norm)"
)
panels[0].set(ylim=(0, None))
panels[1].set(title="loss over rounds", xlabel="round", ylabel="test loss of the mean replica")
panels[2].set(title="loss over bytes", xlabel="sent by all workers (MB)")
panels[2].legend()
plt.show()

# %% [markdown]
# - The torus, with the larger spectral gap, keeps its replicas nearer together than the ring.
#   MATCHA jumps with what was drawn last: after rounds with many links it is as near as the torus,
#   after rounds with few links as far as the ring or farther.
# - Over rounds the losses are close to each other. Here even the ring's replicas are near enough
#   for their mean to learn about as well as with all-reduce. Where replicas are far apart, the
#   loss has a bump.
# - Over bytes the torus is behind: it sends twice as much. Ring and MATCHA are no better than
#   all-reduce. An all-reduce that goes round a ring sends 2 (n − 1) / n copies a worker, which is
#   less than the two of the ring.
#
# So gossip saves no bytes here. What it saves is *messages one after another*: an all-reduce needs
# 2 (n − 1) of them, gossip one for each link of a worker. Where a message takes long to arrive,
# this is what counts. The simulator knows how long an exchange takes.

# %%
from hetjax import simulate
from hetjax.topology import links

param_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
slow = links.LinkModel(latency_secs=1e-3, bytes_per_sec=125e6)  # 1 ms a message, 1 Gbit/s
figure, (left, right) = plt.subplots(1, 2, width_ratios=(2, 3))
for name, run in runs.items():
    rounds = simulate.simulate(
        "equal",
        {"secs_per_microbatch": (1e-3,) * NUM_WORKERS},  # 1 ms of computing a round
        budget=NUM_WORKERS,
        num_rounds=len(run.history),
        reducer=reducers[name],
        param_bytes=param_bytes,
        link=slow,
    )
    left.bar(name, 1e3 * rounds.exchange_secs.mean(), color=COLOURS[name])
    ends = [k for k, report in enumerate(run.history) if report.get("eval")]
    losses = [run.history[k]["eval"]["test_loss"] for k in ends]
    right.plot(rounds.elapsed_secs[ends], losses, color=COLOURS[name], label=name)
left.set(title="exchange of a round, simulated", ylabel="time (ms)")
right.set(
    title="loss over time", xlabel="simulated time (s)", ylabel="test loss of the mean replica"
)
right.legend()
plt.show()

# %% [markdown]
# ## Try this
#
# 1. Set `latency_secs` to `0.0`. Then bytes alone count: expect all-reduce to be as fast as the
#    ring, and the torus to be the slowest.
# 2. Set MATCHA's budget in `CHOICES` to `0.25`. Expect a smaller gap, replicas that are farther
#    apart, and half of the bytes.
# 3. Put `("exponential", 1.0)` into `CHOICES` under a name of its own, with a colour. Each worker
#    has links to those at distances 1, 2, 4, …: expect the largest gap, and the most bytes.
