# %% [markdown]
# # Faults: a run is killed and goes on
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/faults.ipynb)
#
# A long run ends in the middle: the machine is taken away, the power fails, somebody presses the
# wrong key. hetjax writes checkpoints while it trains, and the same call goes on from the newest.
#
# At the end you see a run that was killed in the middle and has gone on, beside one that nobody
# disturbed. Their parameters are equal to the bit. And you see a run that is repeated from its
# trace, although the workers' speeds have changed.

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
# ## A program that trains
#
# This function trains a small network on the digits that come with hetjax, on four emulated
# workers. Their times are noisy, and a gate closes each round when the first worker is done. So it
# depends on chance how many examples a round has. `speeds_seed` says which chance.
#
# The function is written to a file, since it is to run in a process of its own, which can be
# killed. It runs on the CPU there, so that it needs no device that this notebook holds.

# %%
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time


def train(workdir, speeds_seed=0, replay=""):
    import jax
    import numpy as np
    import optax

    import hetjax
    from hetjax.zoo.builders import digits

    def loss_fn(params, batch, rng):
        hidden = jax.nn.relu(batch["image"].reshape(-1, 64) @ params["hidden"])
        logits = hidden @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    draw = np.random.default_rng(0).normal
    params = {"hidden": draw(size=(64, 32)) / 8, "out": draw(size=(32, 10)) / 6}
    examples, _ = digits.arrays()
    return hetjax.fit(
        loss_fn,
        jax.tree.map(np.float32, params),
        optax.adam(1e-3),
        examples,
        epochs=16,
        microbatch_size=8,
        budget=16,
        gate="first",
        local="virtual",
        cluster={
            "secs_per_microbatch": (0.004, 0.006, 0.006, 0.012),
            "delay": "shifted_exponential",
            "delay_per": "round",
            "seed": int(speeds_seed),
        },
        workdir=workdir,
        checkpoint={"every_rounds": 50},
        replay=str(replay),
        progress=False,
    )


directory = tempfile.TemporaryDirectory()  # goes away with the kernel
folder = pathlib.Path(directory.name)
call = "import sys\n\ntrain(*sys.argv[1:])\n"
(folder / "train.py").write_text(f"{inspect.getsource(train)}\n\n{call}")


def start(*arguments):
    """The program in a process of its own."""
    command = [sys.executable, "train.py", *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=folder, env=environment)


def finish(process):
    if status := process.wait():
        raise RuntimeError(f"the program ended with {status}")


# %% [markdown]
# ## Killed in the middle
#
# One run is left alone. The other one gets `SIGKILL` after some 120 rounds, which no program can
# catch: nothing is written any more, nothing is tidied up. A third run, for later, meets other
# delays.

# %%
whole, other, killed = start("whole"), start("other", 1), start("killed")
lines = folder / "killed/metrics.jsonl"
while not lines.is_file() or lines.read_bytes().count(b"\n") < 120:
    if killed.poll() is not None:
        raise RuntimeError("the program ended before it could be killed")
    time.sleep(0.005)
killed.send_signal(signal.SIGKILL)
print("exit status of the killed run:", killed.wait())

# What is left of it: whole lines of metrics.jsonl, and the checkpoints.
until_then = [json.loads(line)["loss"] for line in lines.read_text().split("\n")[:-1]]
kept = sorted(int(path.name) for path in (folder / "killed/checkpoints").glob("[0-9]" * 8))
print(f"{len(until_then)} rounds are recorded; there are checkpoints of rounds {kept}")

# %% [markdown]
# ## Gone on
#
# The same call once more. It finds the newest whole checkpoint, verifies its sums, and goes on
# from there.

# %%
finish(start("killed"))
finish(whole)
finish(other)
undisturbed, gone_on = hetjax.load(folder / "whole"), hetjax.load(folder / "killed")


def losses(run):
    return [report["loss"] for report in run.history]


figure, panels = plt.subplots(1, 2, figsize=(12, 3.8), width_ratios=(3, 2))
for axes in panels:
    axes.plot(losses(undisturbed), color="lightgrey", linewidth=5, label="undisturbed")
    axes.plot(until_then, color="tab:red", label="until it was killed")
    later = range(kept[-1], len(gone_on.history))
    axes.plot(later, losses(gone_on)[kept[-1] :], color="tab:blue", linestyle="--", label="gone on")
    axes.plot(len(until_then) - 1, until_then[-1], "x", color="tab:red", markersize=11, mew=3)
    axes.axvline(kept[-1], color="grey", linestyle=":", label="newest checkpoint")
    axes.set_xlabel("round")
near = slice(kept[-1] - 20, len(until_then) + 20)
panels[1].set_xlim(near.start, near.stop)
panels[1].set_ylim(0.9 * min(losses(undisturbed)[near]), 1.1 * max(losses(undisturbed)[near]))
panels[0].set(title="the whole run", ylabel="training loss of a round")
panels[1].set(title="around the kill")
panels[0].legend()
plt.show()

# %% [markdown]
# What was done between the checkpoint and the kill is done again, and comes out the same: the blue
# dashes lie on the red line, and both on the grey one.
#
# ## Equal to the bit
#
# Each cell is a weight of the first layer. Its shade is the number of bits, of 32, in which two
# runs differ.


# %%
def show_bits(axes, first, second, title):
    bits = [run.params["hidden"].view(np.uint32) for run in (first, second)]
    different = np.bitwise_count(bits[0] ^ bits[1])
    image = axes.imshow(different.T, cmap="magma_r", vmin=0, vmax=32, aspect="auto")
    axes.set(title=f"{title}\n{np.count_nonzero(different):,} of {different.size:,} differ")
    axes.set(xlabel="pixel", ylabel="hidden unit")
    return image


figure, panels = plt.subplots(1, 2, figsize=(10, 3.8))
show_bits(panels[0], undisturbed, gone_on, "undisturbed and gone on")
image = show_bits(
    panels[1], undisturbed, hetjax.load(folder / "other"), "undisturbed and with other delays"
)
figure.colorbar(image, label="bits that differ")
plt.show()
done_again = gone_on.summary["examples_recomputed"]
print(f"{done_again} examples were computed twice; in the ledger each counts once an epoch:")
print(
    {name: gone_on.summary[f"examples_{name}"] for name in ("processed", "missing", "duplicated")}
)

# %% [markdown]
# ## A trace, replayed
#
# The right picture shows why runs are hard to repeat: with other delays the gate closes elsewhere,
# other examples are in each update, and nearly all weights come out otherwise. (Those that stay
# the same are of pixels that are always empty, and of units that never react.) But the file
# `metrics.jsonl` says what each worker did in each round. A *replay* takes that in place of the
# clock.

# %%
finish(start("replayed", 1, folder / "whole/metrics.jsonl"))  # the other delays again

runs = {name: hetjax.load(folder / name) for name in ("whole", "other", "replayed")}
looks = {
    "whole": ("lightgrey", 6, "-"),
    "other": ("tab:red", 1.2, "-"),
    "replayed": ("tab:blue", 1.6, "--"),
}
figure, panels = plt.subplots(1, 3, figsize=(12, 3.8))
for name, (colour, width, dashes) in looks.items():
    history = runs[name].history[:30]
    done = [sum(report["microbatches_done"]) for report in history]
    panels[0].step(range(30), done, color=colour, linewidth=width, linestyle=dashes, where="mid")
    panels[1].plot(
        losses(runs[name])[100:150], color=colour, linewidth=width, linestyle=dashes, label=name
    )
panels[0].set(
    title="size of the first rounds", xlabel="round", ylabel="microbatches of all workers"
)
panels[1].set(
    title="loss, 50 rounds from the 100th on", xlabel="rounds", ylabel="training loss of a round"
)
panels[1].legend()
image = show_bits(panels[2], runs["whole"], runs["replayed"], "first run and replay")
figure.colorbar(image, label="bits that differ")
plt.show()

# %% [markdown]
# The replay ran with the delays of the red run, and did what the grey run did, to the bit. So a
# run on many noisy machines can be repeated on one, to look for a bug, say.

# %% [markdown]
# ## Try this
#
# 1. Change `optax.adam(1e-3)` to `optax.adam(2e-3)` before you go on with a killed run. Expect to
#    be refused: a checkpoint knows the program of the optimiser.
# 2. Set `checkpoint={"every_rounds": 10}`. Expect fewer examples to be computed twice.
# 3. Take `gate="first"` away and run all cells. The size of a round is the budget then, whatever
#    the delays are. Expect the run with other delays to differ by rounding alone: the same numbers
#    are added up in other groups.
