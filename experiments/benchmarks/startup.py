"""How soon does training begin? First rounds over the first step of plain Flax NNX.

    python -m experiments.benchmarks.startup [--only=GROUP,…] [--repeats=3]

Groups: readme, transformer, d_grab, frozen (`benchmarks.frozen`). Each figure is of processes of
their own, with an empty compilation cache where it says cold, started in turn. Seconds are those
from the call of `fit`, or of the first step, to the end of the first round or step; imports are not
in them. The second `fit` in a process is of the same functions, at three times the learning rate.
experiments/results/starting/README.md keeps the tables.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import flags, logging

from experiments import command_line
from experiments.benchmarks import frozen
from experiments.benchmarks.rows import Found, Row, middle, print_tables

_ONLY = flags.DEFINE_list("only", [], "Groups to run; all if empty.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Processes of each kind.", 1)
_CHILD = flags.DEFINE_string("child", None, "What this process measures; set by the program.")

_WORKERS, _SIZE, _BUDGET = 4, 16, 16  # of the runs: workers, examples and microbatches


def _readme() -> tuple[Any, Any, Any]:
    """The model of the README, its loss of each example, and data."""
    import numpy as np
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(10, 64, rngs=rngs)
            self.out = nnx.Linear(64, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.relu(self.hidden(x)))

    x = np.random.default_rng(0).normal(size=(2048, 10)).astype(np.float32)
    data = {"x": x, "y": np.sin(x[:, :1] + x[:, 1:2])}
    return Net(nnx.Rngs(0)), lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(-1), data


def _transformer() -> tuple[Any, Any, Any]:
    """Two layers of width 128 over 32 tokens of 256 kinds, and tokens at random."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norms = nnx.List([nnx.LayerNorm(128, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.norms[0](x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.tokens = nnx.Embed(256, 128, rngs=rngs)
            self.places = nnx.Embed(32, 128, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.out = nnx.Linear(128, 256, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places(jnp.arange(ids.shape[1]))[None]
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["ids"][:, :-1])
        of_tokens = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
        return of_tokens.mean(-1)

    ids = np.random.default_rng(0).integers(256, size=(1024, 33)).astype(np.int32)
    return Model(nnx.Rngs(0)), loss, {"ids": ids}


_PROBLEMS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "readme": _readme,
    "transformer": _transformer,
}


def _plain(name: str) -> dict[str, float]:
    """The first step of plain NNX, on a batch of what all workers have in a round."""
    import jax
    import optax
    from flax import nnx

    model, loss, data = _PROBLEMS[name]()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m, b: loss(m, b).mean())(model, batch)
        optimizer.update(model, grads)
        return value

    batch = {key: values[: _SIZE * _BUDGET] for key, values in data.items()}
    began = time.perf_counter()
    jax.block_until_ready(step(model, optimizer, batch))
    return {"first": time.perf_counter() - began}


def _fit(name: str, ordering: str) -> dict[str, Any]:
    """The first round of `fit`, and that of one at another learning rate in the same process."""
    import hetjax

    hetjax.use_cpu_workers(_WORKERS)
    import jax
    import optax

    model, loss, data = _PROBLEMS[name]()
    compiled: dict[str, float] = {}

    def note(event: str, secs: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":  # or loading, where it is kept
            program = about.get("fun_name", "")
            compiled[program] = compiled.get(program, 0.0) + secs

    jax.monitoring.register_event_duration_secs_listener(note)
    loss_fn, params = hetjax.nnx_loss(model, loss)
    fit = hetjax.fit  # imports what it needs

    def first_round(rate: float) -> dict[str, Any]:
        ended: list[float] = []
        compiled.clear()
        began = time.perf_counter()
        fit(
            loss_fn,
            params,
            optax.inject_hyperparams(optax.adam)(rate),
            data,
            workers=_WORKERS,
            microbatch_size=_SIZE,
            budget=_BUDGET,
            ordering=ordering,
            max_rounds=2,
            epochs=1,
            callbacks=[lambda line: ended.append(time.perf_counter())],
            progress=False,
        )
        return {"secs": ended[0] - began, "compiled": dict(compiled)}

    return {"first": first_round(1e-3), "second": first_round(3e-3)}


_PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": _plain,
    "fit": _fit,
    "frozen_plain": frozen.plain,
    "frozen": frozen.run,
}


def _measured(child: str, cache: str = "") -> dict[str, Any]:
    """What a process of its own finds; compiled programs are kept in `cache`, or not."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    with tempfile.TemporaryDirectory() as empty:
        ended = subprocess.run(
            [sys.executable, "-m", "experiments.benchmarks.startup", f"--child={child}"],
            env={**environ, "XDG_CACHE_HOME": cache or empty},
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        sys.exit(f"{child} failed:\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def _rows(name: str, ordering: str, *, most: float) -> Found:
    plain, cold, warm = [], [], []
    for _ in range(_REPEATS.value):
        with tempfile.TemporaryDirectory() as cache:
            plain.append(_measured(f"plain,{name}", cache)["first"])
            cold.append(_measured(f"fit,{name},{ordering}", cache))
            warm.append(_measured(f"fit,{name},{ordering}", cache))
    ratios = [run["first"]["secs"] / p for run, p in zip(cold, plain, strict=True)]
    yield Row("cold over plain NNX", f"≤ {most:g}", middle(ratios), len(cold))
    yield Row("plain NNX: first step", "none", middle(plain, unit=" s"), len(plain))
    for title, runs, which, target in (
        ("cold", cold, "first", "none"),
        ("warm", warm, "first", "none"),
        ("second fit", cold, "second", "≤ 0.3 s"),
    ):
        found = [run[which] for run in runs]
        reached = middle([each["secs"] for each in found], unit=" s")
        yield Row(title, target, reached, len(found))
        secs = found[0]["compiled"]
        reached = f"{sum(secs.values()):.2f} s, {len(secs)} programs"
        yield Row(f"{title}: compiling and loading", "none", reached)
        longest = sorted(secs, key=lambda program: -secs[program])[:2]
        yield f"{title}: {' and '.join(f'{each} {secs[each]:.2f} s' for each in longest)}."
    yield f"First round: {name}, {ordering}, {_WORKERS} CPU workers. Second: another rate."


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    if _CHILD.value:
        kind, *rest = _CHILD.value.split(",")
        print(json.dumps(_PROGRAMS[kind](*rest)))
        return
    plain_order = "random_reshuffling"
    groups: dict[str, Callable[[], Found]] = {
        "readme": lambda: _rows("readme", plain_order, most=3),
        "transformer": lambda: _rows("transformer", plain_order, most=2.2),
        "d_grab": lambda: _rows("transformer", "d_grab", most=4.5),
        "frozen": lambda: frozen.rows(_measured, _REPEATS.value),
    }
    print_tables(groups, _ONLY.value)


if __name__ == "__main__":
    command_line.run(main)
