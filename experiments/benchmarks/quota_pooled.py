"""Do unequal quotas train as one device does on the pooled batch?"""

import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from experiments import problems
from experiments.benchmarks.rows import Row
from hetjax.data import sources
from hetjax.zoo import datasets

_BUDGET, _SIZE = 20, 16  # microbatches a round, examples a microbatch
_ROUND = _BUDGET * _SIZE  # examples
_NAME = "unequal, changing quotas (0 among them) against one device on the pooled batch"


def _scripted_quotas(path: pathlib.Path, totals: list[int], num_workers: int, seed: int) -> None:
    """A trace whose quotas change every round, with zeros and one worker alone among them."""
    rng = np.random.default_rng(seed)
    lines = []
    for index, total in enumerate(totals):
        weights = rng.random(num_workers) * (rng.random(num_workers) < 0.7)
        if index % 3 == 0 or weights.sum() == 0:
            weights = np.eye(num_workers)[index % num_workers]
        quotas = rng.multinomial(total, weights / weights.sum()).tolist()
        lines.append(json.dumps({"quotas": quotas, "microbatches_done": quotas}))
    path.write_text("\n".join(lines))


def _pooled(
    loss_fn: Any, params: Any, optimizer: Any, data: Any, rounds: list[np.ndarray]
) -> tuple[Any, list[float]]:
    """One device, one step on the pooled batch of each round; a program for each batch size."""

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            return loss_fn(params, batch, jax.random.key(0)).mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for ids in rounds:
        batch = {name: values[ids] for name, values in data.items()}
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return params, losses


def _gap(ours: Any, theirs: Any) -> float:
    """Largest difference of a leaf, relative to the leaf's largest entry."""
    gaps = jax.tree.map(
        lambda a, b: float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))), ours, theirs
    )
    return max(jax.tree.leaves(gaps))


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def _orders(num_examples: int, seed: int, num_epochs: int) -> list[np.ndarray]:
    """The examples of each round, as random reshuffling has them."""
    orders = [np.random.default_rng((seed, e)).permutation(num_examples) for e in range(num_epochs)]
    cuts = range(_ROUND, num_examples, _ROUND)
    return [part for order in orders for part in np.split(order, cuts)]


def _both(
    source: Any, dtype: Any, *, seed: int, num_epochs: int, num_rounds: int | None = None
) -> tuple[float, float, float]:
    """Relative gap of the parameters, and both mean losses of the last epoch."""
    loss_fn, params = problems.classifier("small_cnn", (8, 8, 1), input_max=16.0, param_dtype=dtype)
    whole, rest = divmod(-(-len(source) // _SIZE), _BUDGET)
    totals = [_BUDGET] * whole + ([rest] if rest else [])
    script = (totals * num_epochs)[:num_rounds]
    rounds = _orders(len(source), seed, num_epochs)[:num_rounds]
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.jsonl"
        _scripted_quotas(trace, script, 4, seed)
        result = _replayed(
            loss_fn,
            params,
            source,
            trace,
            seed=seed,
            epochs=num_epochs,
            callbacks=[] if num_rounds is None else [lambda line: line.round == num_rounds - 2],
        )
    assert result.summary["rounds"] == len(rounds), (result.summary["rounds"], len(rounds))
    params, losses = _pooled(loss_fn, params, _optimizer(), source.arrays, rounds)
    last = slice(-len(totals), None)
    ours = np.mean([line["loss"] for line in result.history[last]])
    return _gap(result.params, params), float(ours), float(np.mean(losses[last]))


def _replayed(loss_fn: Any, params: Any, source: Any, trace: pathlib.Path, **fields: Any) -> Any:
    return hetjax.fit(
        loss_fn,
        params,
        _optimizer(),
        source,
        microbatch_size=_SIZE,
        budget=_BUDGET,
        cluster={"num_workers": 4},
        replay=str(trace),
        progress=False,
        **fields,
    )


def _one_round_gap(source: Any) -> float:
    """Of the parameters after one round in float32."""
    loss_fn, params = problems.classifier("small_cnn", (8, 8, 1), input_max=16.0)
    first = {name: np.asarray(values)[:_ROUND] for name, values in source.arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.jsonl"
        trace.write_text(json.dumps({"quotas": [9, 0, 7, 4], "microbatches_done": [9, 0, 7, 4]}))
        result = _replayed(loss_fn, params, first, trace, epochs=1)
    pooled, _ = _pooled(loss_fn, params, _optimizer(), first, [np.arange(_ROUND)])
    return _gap(result.params, pooled)


def pooled_rows(num_epochs: int = 12, seeds: int = 3) -> list[Row]:
    """Unequal and changing quotas against one device on the pooled batch, on the digits."""
    source = sources.load_all(datasets.load("digits").train)
    jax.config.update("jax_enable_x64", True)
    gap, _, _ = _both(source, jnp.float64, seed=0, num_epochs=num_epochs, num_rounds=50)
    jax.config.update("jax_enable_x64", False)
    one_round = _one_round_gap(source)
    runs = [_both(source, jnp.float32, seed=seed, num_epochs=1) for seed in range(seeds)]
    ours, theirs = np.array([r[1] for r in runs]), np.array([r[2] for r in runs])
    return [
        Row(f"{_NAME}, float64, 50 rounds: relative gap", "≤ 1e-12", f"{gap:.1e}"),
        Row(f"{_NAME}, float32, 1 round", "≤ 1e-6", f"{one_round:.1e}"),
        Row(
            f"{_NAME}, float32, mean loss of one epoch, {seeds} seeds: largest gap, and spread "
            "of the seeds (standard deviation)",
            "gap ≤ spread",
            f"{np.abs(ours - theirs).max():.1e}, {theirs.std(ddof=1):.1e}",
        ),
    ]
