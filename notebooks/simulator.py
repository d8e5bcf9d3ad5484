# %% [markdown]
# # The simulator
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hetjax/hetjax/blob/main/notebooks/simulator.ipynb)

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
# text

# %%
plt.plot([1, 2])

# %% [markdown]
# ## Try this
# 1. One
# 2. Two
# 3. Three
