"""One process for each worker, on this machine."""

import pathlib
import subprocess
import sys

import numpy as np

import hetjax

PROGRAM = """
import hetjax
hetjax.join_processes()
import numpy as np, optax
x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
data = {"x": x, "y": x.sum(-1)}
def loss_fn(w, batch, rng):
    return (batch["x"] @ w - batch["y"]) ** 2
result = hetjax.fit(loss_fn, np.zeros(8, np.float32), optax.sgd(0.1), data, epochs=10,
                    microbatch_size=8, budget=8, workdir="launched")
"""
pathlib.Path("program.py").write_text(PROGRAM)
command = [sys.executable, "-m", "hetjax.launch", "--workers=2", "--", sys.executable, "program.py"]
subprocess.run(command, check=True)

run = hetjax.load("launched")
np.testing.assert_allclose(run.params, np.ones(8), atol=0.05)
