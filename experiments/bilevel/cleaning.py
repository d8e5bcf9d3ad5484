"""Data cleaning as a bilevel problem: a weight for each training example.

`f(x, y)` is the mean of `sigmoid(x_i)` times the loss of polluted example i, and a ridge; `F(y)`
the mean loss of the clean validation examples. What is given up by noise in a label is seen in
the validation loss, so the weight of a wrong label falls.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bilevel import data as data_lib
from experiments.bilevel import estimators, models, settings
from hetjax import bilevel
from hetjax.bilevel import machine
from hetjax.types import PyTree

_INFO = ("gap", "residual", "multiplier", "step_chosen")  # of a record, where a method has it


class Cleaned(NamedTuple):
    """What a run ends with, at the record with the lowest validation loss."""

    weights: np.ndarray  # f32[num_train], sigmoid(x)
    y: PyTree
    history: list[dict[str, Any]]
    summary: dict[str, Any]


class Indexed(NamedTuple):
    """Training examples that know their places in x."""

    examples: data_lib.Images
    index: np.ndarray | None  # i32[n]; None: all of them, in their order


class Step(NamedTuple):
    """Between two hypergradients."""

    x: PyTree
    opt: optax.OptState
    state: machine.State | None


def make_problem(ridge: float, losses: Any = models.losses) -> bilevel.Bilevel:
    """The two losses, f[n]; an upper batch is `data.Images`, a lower one `Indexed`."""
    of_rows = make_problem_of_rows(ridge, losses)

    def lower(x: PyTree, y: PyTree, batch: Indexed) -> jax.Array:
        own = x if batch.index is None else x[batch.index]
        return of_rows.lower(own, y, batch.examples)

    return bilevel.Bilevel(of_rows.upper, lower)


def make_problem_of_rows(ridge: float, losses: Any = models.losses) -> bilevel.Bilevel:
    """The same of `data.Images` alone, with x the numbers of these: for `PerExample`."""

    def upper(x: PyTree, y: PyTree, batch: data_lib.Images) -> jax.Array:
        del x
        return losses(y, batch)

    def lower(x: PyTree, y: PyTree, batch: data_lib.Images) -> jax.Array:
        return jax.nn.sigmoid(x) * losses(y, batch) + ridge / 2 * models.squares(y)

    return bilevel.Bilevel(upper, lower)


def outer_step(
    config: settings.CleaningConfig, y: PyTree, losses: Any = models.losses
) -> tuple[Step, Callable[[Step, bilevel.Batches], tuple[Step, machine.Info]]]:
    """The first step's input, and one hypergradient with its update of x, to be jitted."""
    problem, estimator = make_problem(config.lower.ridge, losses), estimators.make(config)
    tx = estimators.make_upper(config)
    x: PyTree = jnp.zeros(config.data.num_train)
    if estimators.learns_start(config):
        x = bilevel.Learned(x, y)

    def step(at: Step, batches: bilevel.Batches) -> tuple[Step, machine.Info]:
        found = bilevel.hypergradient(problem, estimator, at.x, y, batches, at.state)
        updates, opt = tx.update(found.grad_x, at.opt, at.x)
        return Step(optax.apply_updates(at.x, updates), opt, found.state), found.info

    return Step(x, tx.init(x), None), step


def in_blocks(batches: bilevel.Batches, size: int) -> bilevel.Batches:
    """Both levels in blocks of so many examples; whole if it is 0."""
    if not size:
        return batches
    index = jnp.arange(len(batches.lower.examples.labels), dtype=jnp.int32)
    lower = batches.lower._replace(index=index)
    return bilevel.Batches(*(bilevel.Blocks.of(each, size) for each in (batches.upper, lower)))


def weights_of(x: PyTree) -> jax.Array:
    """Of the examples."""
    return jax.nn.sigmoid(x.x if isinstance(x, bilevel.Learned) else x)


def work(cost: bilevel.Cost) -> float:
    """A cost in gradients: a product counts as two of them, a loss as half of one."""
    products = cost.hessian_products + cost.cross_products
    return cost.gradients + 2 * products + cost.losses / 2


def f1(kept: np.ndarray, good: np.ndarray) -> float:
    """Of the examples that are kept, against those that are good."""
    both, total = np.sum(kept & good), np.sum(kept) + np.sum(good)
    return float(2 * both / total) if total else 0.0


def told_apart(weights: np.ndarray, data: data_lib.Data) -> dict[str, float]:
    """How well weights above 1/2 are those of clean examples, in both conventions.

    `f1_true_labels` calls an example clean whose label is right, `f1_drawn` one whose label was
    not drawn; about one drawn label in ten is right.
    """
    kept = weights > 0.5
    return {
        "f1_true_labels": f1(kept, data.is_right),
        "f1_drawn": f1(kept, ~data.is_drawn),
        "kept_fraction": float(np.mean(kept)),
        "mean_weight_right": float(np.mean(weights[data.is_right])),
        "mean_weight_wrong": float(np.mean(weights[~data.is_right])) if any(~data.is_right) else 0,
    }


def clean(
    config: settings.CleaningConfig,
    data: data_lib.Data,
    *,
    on_record: Callable[[dict[str, Any]], object] = lambda record: None,
) -> Cleaned:
    """Finds weights and y; every `eval_every` hypergradients a record.

    `train_secs` of a record is the time of the hypergradients and updates, without compiling and
    evaluating.
    """
    net = models.net(config, data)
    problem = make_problem(config.lower.ridge, net.losses)
    first, step = outer_step(config, net.params, net.losses)
    jitted = jax.jit(step)
    whole = jax.device_put(bilevel.Batches(data.validation, Indexed(data.train, None)))
    batches = in_blocks(whole, config.data.block_size)
    test = jax.device_put(data.test)
    evaluate = jax.jit(
        lambda x, y: (
            jnp.mean(problem.upper(x, y, whole.upper)),
            jnp.mean(problem.lower(x, y, whole.lower)),
        )
    )
    began = time.perf_counter()
    second, info = jitted(first, batches)
    later = jitted.lower(second, batches).compile()
    jax.block_until_ready(later(second, batches))
    compiled = {
        "compile_secs": time.perf_counter() - began,
        "temporary_bytes": later.memory_analysis().temp_size_in_bytes,
    }

    at, best, secs, history = first, None, 0.0, []
    for number in range(1, config.upper.steps // config.eval_every + 1):
        began = time.perf_counter()
        for _ in range(config.eval_every):
            before = at.x
            at, info = (jitted if at.state is None else later)(at, batches)
        jax.block_until_ready(at)
        secs += time.perf_counter() - began
        assert at.state is not None
        y, x = at.state.y, before.x if isinstance(before, bilevel.Learned) else before
        weights = np.asarray(weights_of(before))
        upper, lower = map(float, evaluate(x, y))
        steps = number * config.eval_every
        record = {
            "step": steps,
            "train_secs": secs,
            "gradients": steps * info.cost.gradients,
            "products": steps * (info.cost.hessian_products + info.cost.cross_products),
            "work": steps * work(info.cost),
            "validation_loss": upper,
            "lower_loss": lower,
            **{name: float(v) for name in _INFO if not isinstance(v := getattr(info, name), tuple)},
            "test_accuracy": float(models.accuracy(y, test, net.right)),
            "validation_accuracy": float(models.accuracy(y, whole.upper, net.right)),
            **told_apart(weights, data),
        }
        history.append(record)
        on_record(record)
        if not math.isfinite(upper):
            break
        if best is None or upper < best[0]:
            best = upper, weights, y, record
    return ended(config, data, best, history, info.cost, compiled)


def ended(
    config: settings.CleaningConfig,
    data: data_lib.Data,
    best: tuple | None,
    history: list[dict[str, Any]],
    cost: bilevel.Cost,
    more: dict[str, Any],
) -> Cleaned:
    """What a run ends with, at its best record `(F, weights, y, record)`.

    Raises:
        ValueError: there is none: the validation loss was never finite.
    """
    if best is None:
        raise ValueError(
            f"The validation loss is not finite after {history[-1]['step']} hypergradients of "
            f"{config.estimator.name}. Lower lower.learning_rate={config.lower.learning_rate} or "
            f"upper.learning_rate={config.upper.learning_rate}"
        )
    _, weights, y, record = best
    net = models.net(config, data)
    retrained = retrain(config, data, weights, net)
    edges = np.linspace(0, 1, 41)
    summary = {
        "estimator": estimators.METHODS[config.estimator.name].title,
        "chosen_step": record["step"],
        "diverged": not math.isfinite(history[-1]["validation_loss"]),
        "test_accuracy": record["test_accuracy"],
        "retrained_test_accuracy": float(models.accuracy(retrained, data.test, net.right)),
        **{name: record[name] for name in told_apart(weights, data)},
        "validation_loss": record["validation_loss"],
        "hypergradients": history[-1]["step"],
        "train_secs": history[-1]["train_secs"],
        **more,
        "gradients": history[-1]["gradients"],
        "products": history[-1]["products"],
        "work": history[-1]["work"],
        "cost_of_a_hypergradient": dataclasses.asdict(cost),
        "weights": {
            "edges": edges.tolist(),
            "right": np.histogram(weights[data.is_right], edges)[0].tolist(),
            "wrong": np.histogram(weights[~data.is_right], edges)[0].tolist(),
        },
    }
    return Cleaned(weights, y, history, summary)


def retrain(
    config: settings.CleaningConfig, data: data_lib.Data, weights: np.ndarray, net: models.Net
) -> PyTree:
    """A model trained on the weighted training examples and validation together."""
    batch = models.both(data.train, data.validation)
    ones = np.ones(len(data.validation.labels), np.float32)
    return models.train(
        net.params,
        batch,
        np.concatenate([weights, ones]).astype(np.float32),
        config.lower.ridge,
        num_steps=config.retrain_steps,
        losses=net.losses,
    )
