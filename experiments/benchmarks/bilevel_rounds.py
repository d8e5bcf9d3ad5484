"""Bilevel estimators inside rounds: exactness, cost of a request, bytes, gates and gossip.

The small problem is that of the tests; the cleaning of labels is that of the digits.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
import hetjax.quota
from experiments.benchmarks.rows import Row
from experiments.bilevel import cleaning, models, settings
from experiments.bilevel import data as data_lib
from hetjax import bilevel, simulate
from hetjax.bilevel import RECIPES, Kind, PerExample
from hetjax.cluster import emulate
from hetjax.levels import rules
from hetjax.levels import run as run_lib
from tests.levels import problems

_UNEQUAL = hetjax.quota.static(proportions=(7.0, 1.0, 0.0, 12.0))
_DYNAMIC = ("bome",)  # takes inner products of gradients in x
_OF_X = ("ridge",)


def exact_rows() -> list[Row]:
    """The greatest difference from the package alone, in float64."""
    jax.config.update("jax_enable_x64", True)
    try:
        forms: dict[str, dict[str, Any]] = {
            "`fused`, quotas 7 : 1 : 0 : 12": {"local": "fused", "quota": _UNEQUAL},
            "`stepped`, the same": {"local": "stepped", "quota": _UNEQUAL},
            "`virtual`, the same": {"local": "virtual", "quota": _UNEQUAL},
            "`fused`, 1 worker": {"local": "fused", "workers": 1},
            "`fused`, 8 workers, microbatches of 4": {
                "local": "fused",
                "workers": 8,
                "microbatch_size": 4,
            },
        }
        names = [*problems.KINDS, "forward", *RECIPES]
        return [_exact_row(form, fields, names) for form, fields in forms.items()]
    finally:
        jax.config.update("jax_enable_x64", False)


def _exact_row(form: str, fields: dict[str, Any], names: list[str]) -> Row:
    tx, worst, which = optax.sgd(0.2, momentum=0.5), 0.0, ""
    for name in names:
        problem, x, y, estimator = problems.given(name)
        if name in _DYNAMIC:
            problem, x = problems.without_rows(), {n: x[n] for n in _OF_X}
        alone, *_ = problems.alone(problem, x, y, estimator, tx, problems.whole(), 2)
        found, *_ = problems.in_rounds(problem, x, y, estimator, tx, 2, **fields)
        distance = problems.distance(problems.moved(x, alone), problems.moved(x, found))
        if distance > worst or np.isnan(distance):
            worst, which = distance, name
        jax.clear_caches()
    return Row(
        "how far two outer steps move x, against the package alone: greatest difference over the "
        f"greatest number, {len(names)} estimators, {form}",
        "≤ 1e-12",
        f"{worst:.1e} ({which})",
    )


# --- What a request costs over a round of the plain rule ---


def _mlp_losses(y: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["inputs"] @ y["first"])
    logits = hidden @ y["second"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def _mlp_data(num: int = 4096, size: int = 784) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    data = {
        "inputs": rng.normal(size=(num, size)).astype(np.float32),
        "labels": rng.integers(0, 10, num).astype(np.int32),
    }
    y = {
        "first": (rng.normal(size=(size, 300)) / 28).astype(np.float32),
        "second": (rng.normal(size=(300, 10)) / 17).astype(np.float32),
    }
    return data, y


def cost_rows(turns: int = 60) -> list[Row]:
    """A request with what the estimator computes after it, and a round of the plain rule."""
    data, y = _mlp_data()
    num = len(data["labels"])

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        return jax.nn.sigmoid(x) * _mlp_losses(y, batch)

    problem = bilevel.Bilevel(lambda x, y, batch: _mlp_losses(y, batch), lower)
    options: dict[str, Any] = {
        "workers": 4,
        "microbatch_size": 64,
        "budget": 16,
        "loss_over": "microbatch",
        "quota": "equal",
    }
    x = PerExample(np.zeros(num, np.float32))
    steps = bilevel.descent(optax.sgd(0.01))
    small = {name: leaf[:256] for name, leaf in data.items()}
    found = []
    for what, estimator in (
        ("gradient", bilevel.value_gap(steps, turns)),
        ("Hessian product", bilevel.implicit(steps, 0, solve=bilevel.cg(turns), warm=False)),
    ):
        with (
            run_lib.BilevelRun(
                problem,
                x,
                y,
                estimator,
                optax.sgd(0.1),
                upper_source=small,
                lower_source=data,
                **options,
            ) as run,
            _plain(what, problem, num, data, y, options) as plain,
        ):
            ratios = _paired(run, plain, what, turns)
        low, high = np.quantile(ratios, (0.25, 0.75))
        found.append(
            Row(
                f"a request for a {what} over the plain rule's round (MLP, 4 workers, 1,024 "
                "examples): time",
                "≤ 1.05",
                f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
            )
        )
    return found


class _Plain:
    """Rounds of a plain rule: gradients with an update, or products of a vector without."""

    def __init__(self, run: hetjax.Run, kind: str, given: Any) -> None:
        self.run, self._kind, self._given = run, kind, given
        self._state = run.init()
        for _ in range(3):
            self()

    def __enter__(self) -> "_Plain":
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()

    def __call__(self) -> float:
        began = time.perf_counter()
        self._state, report = self.run.round(self._state, kind=self._kind, given=self._given)
        jax.block_until_ready((self._state.train, report.mean))
        return time.perf_counter() - began


def _plain(
    what: str, problem: bilevel.Bilevel, num: int, data: Any, y: Any, options: dict[str, Any]
) -> _Plain:
    """The same work by a rule that knows nothing of estimators."""
    weighted = {**data, "weight": np.zeros(num, np.float32)}

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        del rng
        return problem.lower(batch["weight"], params, batch)

    if what == "gradient":
        return _Plain(hetjax.Run(loss, y, optax.sgd(0.01), weighted, **options), "main", ())
    from tests.own_parts import hessian_product

    rule = hessian_product.hessian_product(loss)
    run = hetjax.Run(loss, y, None, weighted, rules={"product": rule}, **options)
    return _Plain(run, "product", y)


def _paired(run: run_lib.BilevelRun, plain: _Plain, what: str, turns: int) -> list[float]:
    """Ratios of a request's time, and of the plain round after it."""
    kind = Kind.GRADIENT if what == "gradient" else Kind.PRODUCTS
    ratios: list[float] = []
    state, _ = run.step(run.init())  # compiles all
    walk = run.begin(state)
    while walk.asked is not None:
        began = time.perf_counter()
        walk = run.request(walk)
        jax.block_until_ready((walk.carry, walk.asked))
        secs = time.perf_counter() - began
        asked = walk.rounds[-1].what
        if asked.level == "lower" and asked.kind is kind and "y" in asked.wrt:
            ratios.append(secs / plain())
    run.end(walk)
    return ratios[3 : turns - 1]


# --- Bytes of an outer step ---


def bytes_rows() -> list[Row]:
    """Of the digits' cleaning, softmax regression, four workers: by the estimators' programs."""
    found = []
    y = {"weights": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
    rows = {"per example": PerExample(np.zeros(600, np.float32)), "ridge": np.zeros(1, np.float32)}
    for name, make in _ESTIMATORS.items():
        told = []
        for x in rows.values():
            program = make().program(x)
            sizes = _size_of_step(program, x, y)
            told.append(f"{sizes / 1e3:,.0f} kB")
        requests = sum(_times(program).values())
        found.append(
            Row(
                f"{name}, T = 10: requests, and bytes that four workers send in an outer step for "
                "weights of examples, and for one shared number",
                "told",
                f"{requests}; {'; '.join(told)}",
            )
        )
    return found


_LOWER = bilevel.descent(optax.sgd(0.5))
_ESTIMATORS: dict[str, Callable[[], bilevel.Estimator]] = {
    "value gap": lambda: bilevel.value_gap(_LOWER, 10),
    "value gap, central": lambda: bilevel.value_gap(_LOWER, 10, central=True),
    "implicit, CG 10": lambda: bilevel.implicit(_LOWER, 10, solve=bilevel.cg(10)),
    "implicit, Neumann 10": lambda: bilevel.implicit(_LOWER, 10, solve=bilevel.neumann(10, 0.5)),
    "unrolled": lambda: bilevel.unroll(_LOWER, 10),
    "unrolled, checkpointed": lambda: bilevel.unroll(_LOWER, 10, checkpoint=True, start="cold"),
    "unrolled, last 5": lambda: bilevel.unroll(_LOWER, 10, back=5),
    "first order": lambda: bilevel.unroll(_LOWER, 10, back=0),
}


def _times(program: Any) -> dict[bilevel.What, int]:
    """How often each request is made."""
    found: dict[bilevel.What, int] = {}
    for step in program:
        if hasattr(step, "what"):
            found[step.what] = found.get(step.what, 0) + 1
        elif hasattr(step, "steps"):
            for what, times in _times(step.steps).items():
                found[what] = found.get(what, 0) + step.times * times
    return found


def _size_of_step(program: Any, x: Any, y: Any, num_workers: int = 4) -> float:
    """Sums round a ring; the rows of x meet once."""
    point = rules.Point(x, y, y)
    copies = 2 * (num_workers - 1)
    sums = sum(
        times * rules.size_bytes(what, point, gossips=False)
        for what, times in _times(program).items()
    )
    rows = x.values.nbytes if isinstance(x, PerExample) else 0
    return copies * (sums + rows)


# --- Cleaning on the virtual clock: gates and gossip ---


def _cleaning(seed: int) -> tuple[settings.CleaningConfig, data_lib.Data]:
    config = settings.CleaningConfig(seed=seed)
    return config, data_lib.make(config.data, seed)


def _fit(seed: int, outer_steps: int = 60, **fields: Any) -> hetjax.BilevelResult:
    config, data = _cleaning(seed)
    y = models.init(config.model, data.train.images.shape[1], data.num_classes, seed)
    options: dict[str, Any] = {
        "local": "virtual",
        "microbatch_size": 10,
        "loss_over": "microbatch",
        "progress": False,
        "eval_every": outer_steps,
        "seed": seed,
        **fields,
    }
    return hetjax.fit_bilevel(
        cleaning.make_problem_of_rows(config.lower.ridge),
        PerExample(np.zeros(len(data.train.labels), np.float32)),
        y,
        bilevel.value_gap(bilevel.descent(optax.sgd(0.5)), 5, multiplier=1.0),
        optax.adam(0.1),
        upper_source=data.validation,
        lower_source=data.train,
        outer_steps=outer_steps,
        eval_source=data.validation,
        **options,
    )


def _smooth(result: hetjax.BilevelResult, width: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, F) at the end of each step, F as a mean of the last few."""
    losses = np.array([line["upper_loss"] for line in result.history])
    kernel = np.ones(width) / width
    means = np.convolve(np.pad(losses, (width - 1, 0), mode="edge"), kernel, mode="valid")
    secs = np.array([line["start_secs"] + line["step_secs"] for line in result.history])
    return secs, means


def _secs_to(result: hetjax.BilevelResult, loss: float) -> float:
    secs, losses = _smooth(result)
    return float(secs[losses <= loss][0]) if np.any(losses <= loss) else float("nan")


def gate_rows(num_workers: int = 8, budget: int = 32) -> Iterator[Row]:
    """Eight workers with exponential times, drawn each round: requests wait, or close.

    No gate closes a round that ends a pass over the data: the fewer of them, the more it is worth.
    """
    delays = {"delay": "exponential", "delay_per": "round"}
    cluster = emulate.EmulatedCluster((0.01,) * num_workers, 0.0, seed=0, **delays)
    simulated = {
        gate: simulate.simulate("equal", cluster, budget=budget, num_rounds=2000, gate=gate)
        for gate in ("none", "first")
    }
    told = simulated["first"].microbatches_per_sec / simulated["none"].microbatches_per_sec
    fields: dict[str, Any] = {
        "cluster": {
            "num_workers": num_workers,
            "secs_per_microbatch": (0.01,) * num_workers,
            **delays,
            "clock": "virtual",
        },
        "quota": "equal",
        "budget": budget,
    }
    for size in (2, 4, 10):
        yield from _gate_rows(size, told, budget * size, {**fields, "microbatch_size": size})


def _gate_rows(size: int, told: float, num_examples: int, fields: dict[str, Any]) -> Iterator[Row]:
    ratios, biases, waited = [], [], []  # of each seed
    for seed in range(3):
        waits = _fit(seed, 120, **fields)
        closes = _fit(seed, 240, gate={"trigger": "first"}, **fields)
        target = 1.02 * _smooth(waits)[1][-1]
        ratios.append(_secs_to(waits, target) / _secs_to(closes, target))
        new = [line for line in closes.rounds if line["is_new"]]
        waited.append(np.mean([line["microbatches_done"] == line["quotas"] for line in new]))
        exact = _weights(_fit(seed, 120, workers=8, quota="equal", microbatch_size=size))
        both = waits, _fit(seed, 120, gate={"trigger": "first"}, **fields)
        biases.append([float(np.mean(abs(_weights(r) - exact))) for r in both])
    yield Row(
        "value gap with gate `first`, 8 workers whose times are exponential, drawn each round, "
        f"requests of {num_examples} of 600 or 400 examples: time to the same F over that without "
        "a gate, three seeds; the simulator's ratio of examples a second; rounds that no gate "
        "closed, since they end a pass",
        "≥ 90 % of it",
        f"{', '.join(f'{r:.2f}' for r in ratios)}; {told:.2f}: "
        f"{statistics.median(ratios) / told:.0%}; {statistics.median(waited):.0%}",
    )
    yield Row(
        "its bias: weights of examples after 120 outer steps, mean difference from those of whole "
        "batches: without a gate, with one",
        "told",
        "; ".join(f"{a:.3f}, {b:.3f}" for a, b in biases),
    )


def _weights(result: hetjax.BilevelResult) -> np.ndarray:
    return np.asarray(jax.nn.sigmoid(result.x))


def gossip_rows() -> Iterator[Row]:
    """F of the mean replica at equal examples, against all-reduce's, three seeds."""
    reducers: dict[str, Any] = {
        "all_reduce": "all_reduce",
        "d_psgd, ring": {"name": "d_psgd", "graph": "ring"},
        "matcha, ring, half of the links": {"name": "matcha", "graph": "ring", "budget": 0.5},
    }
    found: dict[str, list[float]] = {}
    for name, reducer in reducers.items():
        for seed in range(3):
            result = _fit(seed, 60, reducer=reducer, workers=4, quota="equal", budget=20)
            found.setdefault(name, []).append(result.summary["test_loss"])
    base = found.pop("all_reduce")
    spread = statistics.stdev(base)
    for name, losses in found.items():
        gap = statistics.mean(losses) - statistics.mean(base)
        yield Row(
            f"value gap with `{name}`, 4 workers: F at equal examples, three seeds, all-reduce's "
            "beside it; difference of the means over the spread of all-reduce's",
            "within 1",
            f"{_told(losses)}; {_told(base)}; {gap / spread:+.2f}",
        )


def _told(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
