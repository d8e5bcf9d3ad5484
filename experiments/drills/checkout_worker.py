"""What `checkouts` runs in each checkout: training runs that are cut and resumed.

    python -P experiments/drills/checkout_worker.py ARMS DIRECTORY

The environment's PYTHONPATH names the checkout whose hetjax is imported. That hetjax may be older
or newer than this file, so only names are used that all of them have: `fit` with plain fields, and
what a run leaves in its directory. ARMS is a JSON list; each arm gets a directory of its name with
`run`, the run's own, and `result.npz`, or `error.txt`.
"""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import sys
import traceback
from typing import Any

import jax
import numpy as np
import optax

import hetjax

_NUM_FEATURES, _NUM_CLASSES, _NUM_HIDDEN = 5, 3, 6
_ARMS_PER_CACHE = 25  # compiled programs are forgotten then


def main(arms: str, directory: str) -> None:
    """Runs all arms one after the other; process 0 writes."""
    checkout = pathlib.Path(os.environ["PYTHONPATH"]).resolve()
    if not pathlib.Path(hetjax.__file__).resolve().is_relative_to(checkout):
        sys.exit(f"hetjax was imported from {hetjax.__file__}, and not from {checkout}")
    hetjax.join_processes()
    number = int(os.environ.get("HETJAX_PROCESS_ID", "0"))
    hetjax.use_cpu_workers(4 // int(os.environ.get("HETJAX_NUM_PROCESSES", "1")))
    _leave_out_pictures()
    for index, arm in enumerate(json.loads(pathlib.Path(arms).read_text())):
        own = pathlib.Path(directory, arm["name"])
        own.mkdir(parents=True, exist_ok=True)
        try:
            arrays = run(arm, own / "run")
        except Exception:
            (own / "error.txt").write_text(traceback.format_exc())
            continue
        if number == 0:
            np.savez(own / "new.npz", **arrays)
            (own / "new.npz").replace(own / "result.npz")
        if index % _ARMS_PER_CACHE == _ARMS_PER_CACHE - 1:
            jax.clear_caches()


def _leave_out_pictures() -> None:
    """The page of a run takes a third of its time; where it lies elsewhere it is made."""
    with contextlib.suppress(ImportError):
        report = importlib.import_module("hetjax.report")
        if hasattr(report, "write_report"):
            report.write_report = lambda *args, **fields: None


def run(arm: dict[str, Any], workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Trains until a round is over, goes on to the end, and returns what `fit` does."""
    dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
    rng = np.random.default_rng(7)
    data = {
        "x": rng.normal(size=(arm["num_examples"], _NUM_FEATURES)).astype(dtype),
        "y": rng.integers(_NUM_CLASSES, size=arm["num_examples"]).astype(np.int32),
    }
    optimizers = {"sgd": optax.sgd(0.3, momentum=0.9), "adam": optax.adam(0.03)}

    def fit(*callbacks: Any) -> Any:
        return hetjax.fit(
            _loss,
            _params(arm["model"], dtype, np.random.default_rng(8)),
            optimizers[arm["optimizer"]],
            data,
            eval_source=data,
            workdir=workdir,
            callbacks=callbacks,
            progress=False,
            **arm["fields"],
        )

    def interrupt(line: Any) -> None:
        if line.round == arm["cut_round"]:
            signal.raise_signal(signal.SIGINT)

    cut = fit(interrupt)
    if not cut.summary["interrupted"]:
        raise ValueError(f"the run was over after {len(cut.history)} rounds, before its cut")
    whole = fit()
    named = {"params": whole.params, "best_params": whole.best_params}
    return {
        f"{name}/{index}": np.asarray(leaf)
        for name, tree in named.items()
        for index, leaf in enumerate(jax.tree.leaves(tree))
    }


def _params(model: str, dtype: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    if model == "logistic":
        return {"out": rng.normal(size=(_NUM_FEATURES, _NUM_CLASSES)).astype(dtype)}
    return {
        "hidden": rng.normal(size=(_NUM_FEATURES, _NUM_HIDDEN)).astype(dtype),
        "bias": np.zeros(_NUM_HIDDEN, dtype),
        "out": rng.normal(size=(_NUM_HIDDEN, _NUM_CLASSES)).astype(dtype),
    }


def _loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    x = batch["x"]
    if "hidden" in params:
        x = jax.numpy.tanh(x @ params["hidden"] + params["bias"][None])
    noise = 0.1 * jax.random.normal(
        rng, params["out"].shape, params["out"].dtype
    )  # wrong keys show
    logits = x @ (params["out"] + noise)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


if __name__ == "__main__":
    main(*sys.argv[1:])
