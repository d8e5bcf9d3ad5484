# %% [markdown]
# # Labels cleaned
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/bilevel_cleaning.ipynb)
#
# Half of the labels of 600 digits are drawn at random; 400 others are right. Which of the 600 are wrong? Each gets a
# weight, and the weights are learned, so that a model trained by them does well on the 400. This is a bilevel
# problem: the upper loss F is that of the 400 digits, the lower loss f the weighted one of the 600.
#
# At the end one sees the labels that were found wrong, and the three families of hypergradients beside each other, on
# four workers at speeds 4:2:1:1.

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
# ## The data
# One drawn label in ten is right by chance. The wrong ones are red.

# %%
import jax.numpy as jnp

from hetjax import bilevel
from hetjax.zoo.builders import digits

parts = digits.arrays()
images, truth = (np.concatenate([part[name] for part in parts]) for name in ("image", "label"))
images = images.reshape(-1, 64)
rng = np.random.default_rng(0)
order = rng.permutation(len(images))
rows, clean_rows, test_rows = np.split(order, [600, 1000])
labels = truth[rows].copy()
labels[:300] = rng.integers(0, 10, 300)
is_wrong = labels != truth[rows]
train = {"images": images[rows], "labels": labels}
clean = {"images": images[clean_rows], "labels": truth[clean_rows]}
test = {"images": images[test_rows], "labels": truth[test_rows]}


def show(chosen, title):
    panels = plt.subplots(2, 12, figsize=(10, 2.4))[1].flat
    for panel, row in zip(panels, chosen, strict=False):
        panel.imshow(train["images"][row].reshape(8, 8), cmap="Greys")
        colour = "#cc3311" if is_wrong[row] else "black"
        panel.set_title(f"{labels[row]}", color=colour, loc="center", fontsize=11)
        panel.set(xticks=[], yticks=[])
    plt.suptitle(title, x=0, ha="left", fontsize=11)


show(
    np.arange(288, 312), f"Digits and the labels that they have; {is_wrong.sum()} of 600 are wrong"
)

# %% [markdown]
# ## The problem
# Losses give one number an example. x has one number for each training example (`PerExample`): a worker is given those of
# its own examples, and they are never sent. A weight is the sigmoid of x.

# %%
RIDGE = 3e-4


def upper(x, y, batch):
    logits = batch["images"] @ y["weights"] + y["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def lower(x, y, batch):
    return jax.nn.sigmoid(x) * upper(x, y, batch) + RIDGE / 2 * jnp.sum(y["weights"] ** 2)


zero = {"weights": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
steps = bilevel.descent(optax.sgd(0.2, momentum=0.9))
families = {
    "unrolled: through five steps": bilevel.unroll(steps, 5),
    "implicit: a linear system": bilevel.implicit(steps, 5, solve=bilevel.cg(5, 0.01)),
    "value gap: two ordinary runs": bilevel.value_gap(steps, 5, multiplier=1.0),
}

# %% [markdown]
# ## The three families
# Each sum that a family asks for is a round of the four workers, and each does as many microbatches as its speed allows.

# %%
results, weights, seen = {}, {}, {}
for name, estimator in families.items():
    seen[name] = []

    def keep(report, name=name):
        w = 1 / (1 + np.exp(-report.x()))
        seen[name].append((w[is_wrong].mean(), w[~is_wrong].mean()))

    results[name] = hetjax.fit_bilevel(
        bilevel.Bilevel(upper, lower),
        bilevel.PerExample(np.zeros(600, np.float32)),
        zero,
        estimator,
        optax.adam(0.15),
        upper_source=clean,
        lower_source=train,
        outer_steps=35,
        workers=4,
        local=local_form(4),
        cluster={"secs_per_microbatch": (0.001, 0.002, 0.004, 0.004), "clock": "virtual"},
        microbatch_size=20,
        callbacks=[keep],
        progress=False,
    )
    weights[name] = 1 / (1 + np.exp(-results[name].x))

# %%
panels = plt.subplots(1, 3, sharey=True)[1]
for panel, (name, own) in zip(panels, weights.items(), strict=True):
    bins = np.linspace(0, 1, 31)
    panel.hist(own[~is_wrong], bins, color="#0072b2", alpha=0.6, label="right labels")
    panel.hist(own[is_wrong], bins, color="#cc3311", alpha=0.6, label="wrong labels")
    panel.set(title=name, xlabel="weight")
panels[0].set_ylabel("examples")
_ = panels[1].legend()
# %% [markdown]
# And on the way there: the mean weight of right labels, blue, and of wrong ones, red, over seconds of the emulated
# workers, on whose clock a microbatch takes as long whatever sum it is for.

# %%
panels = plt.subplots(1, 3, sharey=True)[1]
for panel, name in zip(panels, families, strict=True):
    history = results[name].history
    secs = [line["start_secs"] + line["step_secs"] for line in history]
    wrong, right = np.transpose(seen[name])
    panel.plot(secs, right, color="#0072b2")
    panel.plot(secs, wrong, color="#cc3311")
    panel.set(title=name, xlabel="seconds of the workers", ylim=(0, 1))
_ = panels[0].set_ylabel("mean weight")
# %% [markdown]
# ## What was found
# The training digits with the least weights by the value gap. Red is a label that is wrong indeed.

# %%
chosen = weights["value gap: two ordinary runs"]
show(np.argsort(chosen)[:24], "The 24 least weights")

# %% [markdown]
# ## Is the model better?
# A model is trained on the 600 and the 400, with the weights, with none, and with what nobody knows: the wrong labels left out.


# %%
@jax.jit
def accuracy(own):
    """On the test digits, of a model trained with these weights, and 1 for the 400."""
    both = {k: jnp.concatenate([train[k], clean[k]]) for k in train}
    all_weights = jnp.concatenate([own, jnp.ones(400)])
    optimizer = optax.adam(0.05)

    def loss(y):
        mean = jnp.sum(all_weights * upper(None, y, both)) / jnp.sum(all_weights)
        return mean + RIDGE / 2 * jnp.sum(y["weights"] ** 2)

    def step(carry, _):
        y, state = carry
        updates, state = optimizer.update(jax.grad(loss)(y), state)
        return (optax.apply_updates(y, updates), state), None

    start = jax.tree.map(jnp.asarray, zero)
    y = jax.lax.scan(step, (start, optimizer.init(start)), length=300)[0][0]
    logits = test["images"] @ y["weights"] + y["bias"]
    return jnp.mean(logits.argmax(-1) == test["labels"])


bars = {"all labels, unweighted": accuracy(np.ones(600, np.float32))}
bars["the 400 alone"] = accuracy(np.zeros(600, np.float32))
bars |= {name.split(":")[0]: accuracy(own.astype(np.float32)) for name, own in weights.items()}
bars["wrong labels left out"] = accuracy((~is_wrong).astype(np.float32))
colours = ["0.7", "0.7", "#0072b2", "#0072b2", "#0072b2", "0.4"]
plt.barh(list(bars)[::-1], [100 * float(v) for v in bars.values()][::-1], color=colours[::-1])
plt.xlim(88, 98)
_ = plt.xlabel("test accuracy, %")
# %% [markdown]
# ## The run
# What the workers did, and both losses, of the value gap.

# %%
results["value gap: two ordinary runs"]

# %% [markdown]
# ## Try this
# 1. `labels[:300]` → `labels[:500]`, both times and in `integers`: five labels in six are drawn. Fewer of them are told.
# 2. `upper_source={k: v[:40] for k, v in clean.items()}`: ten times fewer right labels. The two histograms overlap more.
# 3. `unroll(steps, 5, back=0)` counts y as constant. F has no x of its own, so all weights stay at a half.
