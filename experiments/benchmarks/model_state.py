"""Do models with BatchNorm train as in plain Flax? Numbers, accuracy, and what a round costs.

    python -m experiments.benchmarks.model_state [--only=long,resnet18,accuracy,step]
        [--data_dir=DIR]

The accuracy is of CIFAR-10, whose files lie under --data_dir. Plain Flax is NNX on one device: a
jitted step of `nnx.value_and_grad` and `nnx.Optimizer`. Where numbers are compared it takes the
microbatches of a round one by one, from the state before the round (ghost batch normalisation).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx

import hetjax
from experiments import problems
from experiments.benchmarks import quota_overhead, rows
from experiments.benchmarks.rows import Row
from hetjax.zoo import datasets, models

_ONLY = flags.DEFINE_list("only", [], "Groups to measure; all of them by default.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where CIFAR-10 lies.")

_IMAGE = (32, 32, 3)
_CLUSTER = {"num_workers": 4, "secs_per_microbatch": [1.0, 2.0, 4.0, 4.0], "clock": "virtual"}
_FOUR = {"cluster": _CLUSTER, "quota": "adaptive"}
_SIZE, _BUDGET = 32, 4  # a batch of 128
_NUM_TRAIN, _NUM_TEST, _EPOCHS, _SEEDS = 10_000, 5_000, 8, 3


def _resnet(name: str, seed: int = 0) -> nnx.Module:
    rngs = nnx.Rngs(seed)
    return models.make(name, _IMAGE, 10, rngs=rngs, input_max=255.0, norm="batch")


# Plain Flax


def _graph(model: nnx.Module, loss: Callable) -> tuple[Callable, Any, Any]:
    """`(gradients of a batch, parameters, statistics)`, all of them functions of their arguments.

    The first is `(params, stats, batch) -> (grads of the sum, new stats)`.
    """
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def grads_of(params: Any, stats: Any, batch: Any) -> tuple[Any, Any]:
        def total(params: Any) -> tuple[jax.Array, Any]:
            merged = nnx.merge(graph, params, stats, copy=True)
            losses = loss(merged, batch)
            return losses.sum(), nnx.state(merged, nnx.BatchStat)

        return jax.grad(total, has_aux=True)(params)

    return grads_of, params, stats


class Ghost:
    """A round by hand: each microbatch from the same parameters and statistics, then the means."""

    def __init__(self, model: nnx.Module, loss: Callable, optimizer: Any) -> None:
        grads_of, self.params, self.stats = _graph(model, loss)
        self.opt_state = optimizer.init(self.params)
        self._grads_of, self._optimizer = jax.jit(grads_of), optimizer

    def round(self, microbatches: Sequence[Any]) -> None:
        found = [self._grads_of(self.params, self.stats, batch) for batch in microbatches]
        counts = [len(jax.tree.leaves(batch)[0]) for batch in microbatches]
        grads = jax.tree.map(lambda *each: sum(each) / sum(counts), *[grads for grads, _ in found])
        shares = [count / sum(counts) for count in counts]
        self.stats = jax.tree.map(
            lambda *each: sum(share * x for share, x in zip(shares, each, strict=True)),
            *[stats for _, stats in found],
        )
        updates, self.opt_state = self._optimizer.update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def distance(self, params: Any, stats: Any) -> tuple[float, float]:
        """The largest differences of parameters and of statistics."""
        pairs = ((self.params, params), (self.stats, stats))
        return tuple(_largest(*pair) for pair in pairs)  # type: ignore[return-value]


def _largest(one: Any, other: Any) -> float:
    leaves = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (one, other)]
    return max(float(np.abs(a - b).max()) for a, b in zip(*leaves, strict=True))


def _distances(
    model: nnx.Module, loss: Callable, optimizer: Any, data: Any, num_rounds: int, **fields: Any
) -> tuple[float, float]:
    """Of parameters and statistics, after so many rounds, over what each round did."""
    ghost = Ghost(model, loss, optimizer)
    loss_fn, params = hetjax.nnx_loss(model, loss)
    with hetjax.Run(loss_fn, params, optimizer, data, **_FOUR, **fields) as run:
        state = run.init()
        for _ in range(num_rounds):
            state, report = run.round(state)
            ids = [row[row >= 0] for row in report.done.example_ids]
            ghost.round([jax.tree.map(lambda leaf, row=row: leaf[row], data) for row in ids])
        return ghost.distance(*jax.device_get((run.params(state)[0], run.model_state(state))))


# The groups


class _Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        more: Any = {"param_dtype": jnp.float64, "rngs": rngs}
        self.hidden = nnx.Linear(3, 5, **more)
        self.norm = nnx.BatchNorm(5, momentum=0.9, **more)
        self.out = nnx.Linear(5, 10, **more)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def long_rows(num_rounds: int = 50) -> list[Row]:
    drawn = np.random.default_rng(0)
    data = {"image": drawn.normal(size=(96, 3)), "label": drawn.integers(10, size=96)}
    optimizers = {
        "SGD": optax.sgd(0.1),
        "momentum": optax.sgd(0.1, momentum=0.9),
        "Adam": optax.adam(1e-2),
    }
    reached = []
    jax.config.update("jax_enable_x64", True)  # for the threads of the workers, too
    for name, optimizer in optimizers.items():
        model = _Small(nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(model)))
        found = _distances(
            model,
            problems.cross_entropy,
            optimizer,
            data,
            num_rounds,
            microbatch_size=6,
            budget=8,
            epochs=num_rounds,
        )
        reached.append(f"{name} {max(found):.1e}")
    jax.config.update("jax_enable_x64", False)
    figure = f"BatchNorm, float64, NNX: {num_rounds} rounds in a row against one device by hand"
    return [Row(f"{figure}, adaptive quotas, largest difference", "told", "; ".join(reached))]


def resnet18_rows(num_rounds: int = 3) -> list[Row]:
    """At the learning rates with which the configuration begins, and at its highest."""
    model, reached = _resnet("resnet18"), []
    data = problems.images(_SIZE * _BUDGET * num_rounds, _IMAGE)
    warm_up = optax.linear_schedule(0.0, 0.1, 50_000 // (_SIZE * _BUDGET))
    for name, rate in {"warm-up": warm_up, "0.1": 0.1}.items():
        found = _distances(
            model,
            problems.cross_entropy,
            optax.sgd(rate, momentum=0.9, nesterov=True),
            data,
            num_rounds,
            microbatch_size=_SIZE,
            budget=_BUDGET,
            epochs=1,
        )
        reached.append(f"{name}: {found[0]:.1e}, {found[1]:.1e}")
    return [
        Row(
            f"ResNet-18 with BatchNorm, float32, Nesterov, {num_rounds} rounds of {_BUDGET} "
            f"microbatches of {_SIZE}, adaptive quotas, against plain Flax at the same batch and "
            "ghost size: largest difference of parameters, of statistics",
            "≤ 1e-5",
            "; ".join(reached),
        )
    ]


def step_rows(num_rounds: int = 100) -> list[Row]:
    """A round of one worker against the jitted step of the same examples, in turns."""
    rows_of = []
    for size, count in ((128, 1), (32, 1), (32, 4)):
        secs = _of_rounds_and_steps(size, count, num_rounds)
        ratios = [quota_overhead.ratio_of(secs[name], secs["plain"], block=10) for name in secs]
        ours, _, again = [f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ratios]
        rows_of.append(
            Row(
                f"ResNet-8 with BatchNorm, one worker, microbatches of {size}, {count} a round: a "
                f"round over NNX's jitted step of {size * count}, ratio of medians of "
                f"{num_rounds} in turn, 95 % interval",
                "≤ 1.05",
                f"{ours}; plain over itself {again}; plain {np.median(secs['plain']) * 1e3:.1f} ms",
            )
        )
    return rows_of


def _of_rounds_and_steps(size: int, count: int, num_rounds: int) -> dict[str, np.ndarray]:
    model, optimizer = _resnet("resnet8"), optax.sgd(0.01, momentum=0.9)
    data = problems.images(size * count * 20, _IMAGE)
    loss_fn, params = hetjax.nnx_loss(model, problems.cross_entropy)
    batch = {name: jnp.asarray(leaf[: size * count]) for name, leaf in data.items()}

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> None:
        loss = functools.partial(_mean_loss, batch=batch)
        optimizer.update(model, nnx.grad(loss)(model))

    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    plain = nnx.cached_partial(step, model, state)

    def plain_step() -> None:
        plain(batch)
        jax.block_until_ready(nnx.state(model))

    fields = {"epochs": 1_000_000, "microbatch_size": size, "budget": count, "workers": 1}
    with quota_overhead.Rounds(loss_fn, params, optimizer, data, **fields) as ours:
        programs = {"round": ours, "plain": plain_step, "again": plain_step}
        return quota_overhead.in_turn(programs, num_rounds)


def _batches(data: Any, seed: int) -> Iterator[Any]:
    drawn, size = np.random.default_rng(seed), _SIZE * _BUDGET
    for _ in range(_EPOCHS):
        ids = drawn.permutation(_NUM_TRAIN)
        for start in range(0, _NUM_TRAIN, size):
            rows_of = ids[start : start + size]
            yield jax.tree.map(lambda leaf, rows_of=rows_of: leaf[rows_of], data)


def _plain_accuracy(data: Any, test: Any, metrics: Callable, optimizer: Any, seed: int) -> float:
    """Of NNX on one device, whose BatchNorm takes whole batches."""
    model = _resnet("resnet8", seed)
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> None:
        loss = functools.partial(_mean_loss, batch=batch)
        optimizer.update(model, nnx.grad(loss)(model))

    for batch in _batches(data, seed):
        step(model, state, batch)
    _, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    pure = [nnx.to_pure_dict(each) for each in (params, stats)]
    found = hetjax.evaluate(pure[0], test, metrics, model_state=pure[1])
    return float(found["accuracy"])


def _mean_loss(model: nnx.Module, batch: Any) -> jax.Array:
    return problems.cross_entropy(model, batch).mean()


def accuracy_rows() -> list[Row]:
    data, test = _cifar10()
    steps = _EPOCHS * math.ceil(_NUM_TRAIN / (_SIZE * _BUDGET))
    rate = optax.cosine_onecycle_schedule(steps, 0.1)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9))
    pairs = []
    for seed in range(_SEEDS):
        model = _resnet("resnet8", seed)
        loss_fn, params = hetjax.nnx_loss(model, problems.cross_entropy)
        metrics = hetjax.nnx_metrics(model, _accuracy)
        result = hetjax.fit(
            loss_fn,
            params,
            optimizer,
            data,
            eval_source=test,
            metrics_fn=metrics,
            eval_every=_EPOCHS,
            microbatch_size=_SIZE,
            budget=_BUDGET,
            epochs=_EPOCHS,
            seed=seed,
            progress=False,
            **_FOUR,
        )
        theirs = _plain_accuracy(data, test, metrics, optimizer, seed)
        pairs.append((result.summary["test_accuracy"], theirs))
    ours, theirs = np.array(pairs).T
    error = float((ours - theirs).std(ddof=1) / math.sqrt(_SEEDS))
    shown = "; ".join(f"{a:.4f}, {b:.4f}" for a, b in pairs)
    return [
        Row(
            f"ResNet-8 with BatchNorm, {_NUM_TRAIN:,} examples of CIFAR-10, {_EPOCHS} epochs: test "
            f"accuracy with adaptive quotas (microbatches of {_SIZE}) and in plain Flax (batches "
            f"of {_SIZE * _BUDGET}), {_SEEDS} paired seeds",
            "mean difference within its standard error, or told",
            f"{shown}; mean difference {(ours - theirs).mean():+.4f}, standard error {error:.4f}",
        )
    ]


def _accuracy(model: nnx.Module, batch: Any) -> dict[str, jax.Array]:
    return {"accuracy": model(batch["image"]).argmax(-1) == batch["label"]}


def _cifar10() -> tuple[Any, Any]:
    if not _DATA_DIR.value:
        raise SystemExit("--data_dir is missing: the accuracy is of CIFAR-10's files")
    dataset = datasets.load("cifar10", _DATA_DIR.value)
    sets = [(dataset.train, _NUM_TRAIN), (dataset.evals["test"], _NUM_TEST)]
    found = []
    for source, num in sets:
        examples = [source[index] for index in range(num)]
        found.append(jax.tree.map(lambda *leaves: np.stack(leaves), *examples))
    return found[0], found[1]


_GROUPS = {
    "long": long_rows,
    "resnet18": resnet18_rows,
    "step": step_rows,
    "accuracy": accuracy_rows,
}


def main(argv: list[str]) -> None:
    del argv
    hetjax.use_cpu_workers(4)
    rows.print_tables(_GROUPS, _ONLY.value)


if __name__ == "__main__":
    app.run(main)
