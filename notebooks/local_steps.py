# %% [markdown]
# # Local steps: meet less often
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/local_steps.ipynb)
#
# All-reduce meets after every update. Where links are slow that is dear. With *local steps* each
# worker takes steps of its own, and the workers meet from time to time: local SGD, DiLoCo. Here
# the workers are unequal: must all take as many steps, so that the fast one waits?
#
# At the end you see the loss over time with fast and with slow links, where unequal steps come to
# rest by how much each worker counts, and what fewer bytes cost.

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
# ## Equal and unequal steps
#
# Four workers, of which the first is four times as fast as the last two. The digits that come with
# hetjax. In the mean each worker takes eight steps a round. The inner optimiser is SGD; what the
# workers have moved in the mean is the gradient of the outer one, Nesterov's momentum.

# %%
from flax import nnx

from hetjax.zoo.builders import digits

SEED, STEPS = 0, 8
SECS = (0.005, 0.01, 0.02, 0.02)  # of a microbatch, of each worker
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
OUTER = optax.sgd(0.4, momentum=0.6, nesterov=True)


def trained(optimizer, steps, quota, **fields):
    return hetjax.fit(
        loss_fn,
        params,
        optimizer,
        train,
        eval_source=test,
        epochs=8,
        microbatch_size=4,
        budget=4 * steps,
        seed=SEED,
        quota=quota,
        local=fields.pop("local", local_form(4)),
        cluster={"secs_per_microbatch": SECS, "clock": "virtual"},
        progress=False,
        **fields,
    )


rule = hetjax.local_steps(optax.sgd(0.1))
runs = {
    "all-reduce": trained(optax.sgd(0.2), 2, "adaptive"),
    "equal steps": trained(OUTER, STEPS, "equal", rule=rule),
    "unequal steps": trained(OUTER, STEPS, "adaptive", rule=rule),
}
COLOURS = {"all-reduce": "black", "equal steps": "tab:orange", "unequal steps": "tab:blue"}
for name, run in runs.items():
    print(
        f"{name}: a round has {run.history[-2]['microbatches_done']} steps, {len(run.history)} rounds"
    )

# %% [markdown]
# ## Over time
#
# What the clock says is computing alone. A link adds what is sent over its speed. `bytes_sent` is
# what all workers send in a round.

# %%
figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
links = {"links without cost": np.inf, "1 MB/s": 1e6, "0.1 MB/s": 1e5}
for axes, (title, rate) in zip(panels, links.items()):
    for name, run in runs.items():
        lines = run.history
        secs = np.cumsum([line["round_secs"] + line["bytes_sent"] / 4 / rate for line in lines])
        ends = [k for k, line in enumerate(lines) if line.get("eval")]
        losses = [lines[k]["eval"]["test_loss"] for k in ends]
        axes.plot(secs[ends], losses, color=COLOURS[name], label=name)
    axes.set(title=title, xlabel="emulated time (s)", yscale="log")
panels[0].set(ylabel="test loss")
panels[0].legend()
plt.show()

# %% [markdown]
# - Unequal steps are done in half the time of equal ones: nobody waits for the slow workers.
# - The slower the links, the farther all-reduce is behind: it sends after every update.
#
# ## How much a worker counts
#
# Who takes more steps goes further. Here each worker has one number of its own and pulls the
# parameter there. The workers take 8, 4, 2 and 1 steps. By `"uniform"` the fast worker pulls the
# mean to its own number. By `"fednova"` what a worker moved is divided by how far its steps go.

# %%
COUNTS, CENTRES = (8, 4, 2, 1), np.array([-1.0, 0.0, 1.0, 2.0])
same = hetjax.quota.QuotaPolicy(  # shards are of one size, and quotas always the same
    init=lambda workers, budget: (),
    assign=lambda state, total, caps: (np.array(COUNTS), state),
    observe=lambda state, times: state,
)
fields = {"microbatch_size": 1, "budget": 15, "quota": same, "local": "virtual", "workers": 4}
fields |= {"data": {"sharing": "private"}}


def squares(x, batch, rng):
    return 0.5 * (x - batch["centre"]) ** 2


zeros = {"centre": np.zeros(480)}
with hetjax.Run(squares, 0.0, optax.sgd(1.0), zeros, **fields) as run:
    shards = run.setup.stream.shards
for ids, centre in zip(shards, CENTRES):
    zeros["centre"][ids] = centre
found = {}
for weights in ("uniform", "fednova"):
    found[weights] = [0.0]
    rule = hetjax.local_steps(optax.sgd(0.02), weights)
    with hetjax.Run(squares, 0.0, optax.sgd(2.0), zeros, rule=rule, **fields) as run:
        state = run.init()
        for _ in range(30):
            state, _ = run.round(state)
            found[weights].append(float(np.asarray(state.train.params)[0]))

figure, axes = plt.subplots(figsize=(6, 3.4))
for weights, colour in (("uniform", "tab:orange"), ("fednova", "tab:blue")):
    axes.plot(found[weights], color=colour, label=weights)
axes.axhline(CENTRES.mean(), color="black", linestyle=":", label="minimum of all")
axes.set(title="where unequal steps come to rest", xlabel="round", ylabel="parameter")
axes.legend()
plt.show()

# %% [markdown]
# ## Fewer bytes
#
# A worker may hand in rounded numbers, and what is left the next time.

# %%
rule, sent = hetjax.local_steps(optax.sgd(0.1)), {}
for wire in ("float32", "bfloat16", "int8", "int4"):
    reducer = hetjax.topology.all_reduce(wire=wire)
    run = trained(OUTER, STEPS, "adaptive", rule=rule, reducer=reducer, local="virtual")
    lines = run.history
    handed_in = sum(line["bytes_sent"] - line["bytes_of_sums"] for line in lines)
    sent[wire] = handed_in / 1e6, run.summary["test_loss"]
    print(f"{wire}: {sent[wire][0]:.2f} MB handed in, test loss {sent[wire][1]:.4f}")

# %% [markdown]
# ## Try this
#
# 1. Set `STEPS` to `32`. Expect fewer rounds, and a worse loss at the same examples: the workers
#    move apart before they meet.
# 2. Set the rate of the inner steps of `"fednova"` to `0.005`. Expect it to come to rest nearer to
#    the minimum of all, and `"uniform"` to stay away from it.
# 3. Take `OUTER = optax.sgd(1.0)`, the mean of the workers: local SGD. Compare the losses.
