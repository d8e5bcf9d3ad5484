"""The problems that `checkout_worker` trains: data, losses, rules and estimators.

Only names are used that every version of hetjax has.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax import bilevel
from hetjax.local import rules

_NUM_FEATURES, _NUM_CLASSES, _NUM_HIDDEN = 5, 3, 6
_NUM_UPPER, _NUM_LOWER, _NUM_SLOPES = 22, 30, 3
OPTIMIZERS = {"sgd": optax.sgd(0.3, momentum=0.9), "adam": optax.adam(0.03)}
OF_UPPER = {"sgd": optax.sgd(0.05, momentum=0.5), "adam": optax.adam(0.03)}


def dtype() -> Any:
    return np.float64 if jax.config.jax_enable_x64 else np.float32


# One level


def examples(number: int, *, spoiled: int = 0) -> dict[str, np.ndarray]:
    """A classification; the first `spoiled` examples are not finite."""
    rng = np.random.default_rng(7)
    data = {
        "x": rng.normal(size=(number, _NUM_FEATURES)).astype(dtype()),
        "y": rng.integers(_NUM_CLASSES, size=number).astype(np.int32),
    }
    data["x"][:spoiled] = np.nan
    return data


def params(model: str) -> dict[str, np.ndarray]:
    rng, kind = np.random.default_rng(8), dtype()
    if model == "logistic":
        return {"out": rng.normal(size=(_NUM_FEATURES, _NUM_CLASSES)).astype(kind)}
    return {
        "hidden": rng.normal(size=(_NUM_FEATURES, _NUM_HIDDEN)).astype(kind),
        "bias": np.zeros(_NUM_HIDDEN, kind),
        "out": rng.normal(size=(_NUM_HIDDEN, _NUM_CLASSES)).astype(kind),
    }


def _hidden(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["hidden"] + params["bias"][None]) if "hidden" in params else x


def plain_loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    noise = 0.1 * jax.random.normal(
        rng, params["out"].shape, params["out"].dtype
    )  # wrong keys show
    logits = _hidden(params, batch["x"]) @ (params["out"] + noise)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def weighted_loss(params: Any, batch: Any, rng: jax.Array) -> hetjax.Losses:
    """Constant weights, some of them negative, and a metric with weights of its own."""
    losses = plain_loss(params, batch, rng)
    small = jnp.abs(batch["x"]).sum(-1)
    return hetjax.Losses(
        losses,
        batch["x"][:, 0] + 0.5,
        metrics={"twice": 2 * losses, "small": (losses, small)},
    )


def varying_loss(params: Any, batch: Any, rng: jax.Array) -> hetjax.Losses:
    """Weights that depend on the parameters."""
    losses = plain_loss(params, batch, rng)
    return hetjax.Losses(losses, jnp.exp(0.3 * batch["x"][:, 1]) / (1 + losses))


LOSSES = {"plain": plain_loss, "weighted": weighted_loss, "varying": varying_loss}


def metrics(params: Any, batch: Any) -> dict[str, Any]:
    """Each loss, whether it is right, and the same with weights."""
    logits = _hidden(params, batch["x"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = logits.argmax(-1) == batch["y"]
    return {
        "loss": losses,
        "accuracy": right,
        "weighted": (right * 1.0, jnp.exp(batch["x"][:, 0])),
        "perplexity": hetjax.OfMeans(np.exp, losses),
    }


def hessian_product() -> hetjax.LocalRule:
    """`sum_i H_i v` of a worker's examples, and the sum of their gradients that stays with it."""

    def begin(shared: Any, worker: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, (shared.given, shared.params))
        return worker, (*zeros, jnp.zeros((), dtype()))

    def add(shared: Any, worker: Any, sums: Any, microbatch: Any, rng: Any) -> Any:
        key = jax.random.fold_in(rng, microbatch.example_ids[0])

        def gradient(params: Any) -> Any:
            def total(params: Any) -> jax.Array:
                losses = plain_loss(params, microbatch.examples, key)
                return (microbatch.example_mask * losses).sum()

            return jax.grad(total)(params)

        grads, products = jax.jvp(gradient, (shared.params,), (shared.given,))
        of_both = jax.tree.map(jnp.add, sums[:2], (products, grads))
        return worker, (*of_both, sums[2] + microbatch.example_mask.sum())

    def finish(shared: Any, worker: Any, sums: Any) -> Any:
        return worker, sums[0], sums[2]

    reads = rules.Reads(own_sums=lambda sums: sums[1])
    return hetjax.LocalRule(begin, add, finish, reads=reads)


# Two levels


def levels() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Examples of the upper and of the lower level."""
    rng = np.random.default_rng(9)

    def drawn(number: int) -> dict[str, np.ndarray]:
        found = {
            "inputs": rng.normal(size=(number, _NUM_SLOPES)),
            "targets": rng.normal(size=number),
            "weights": rng.uniform(0.5, 2.0, size=number),
        }
        return {name: values.astype(dtype()) for name, values in found.items()}

    return drawn(_NUM_UPPER), drawn(_NUM_LOWER)


def _residual(y: Any, batch: Any) -> jax.Array:
    return batch["inputs"] @ y["slope"] + y["shift"] - batch["targets"]


def _upper(x: Any, y: Any, batch: Any) -> Any:
    direct = jnp.sum(x["ridge"] ** 2) / 10
    return jnp.log(jnp.cosh(_residual(y, batch))) + direct, batch["weights"]


def _lower(x: Any, y: Any, batch: Any) -> Any:
    """Not quadratic in y; a weight for each example where x has one, and a ridge."""
    squares = jnp.sum(y["slope"] ** 2) + y["shift"] ** 2
    own = x.get("weight", batch["targets"])
    loss = jax.nn.sigmoid(own) * (1 + _residual(y, batch) ** 2) ** 0.75
    return loss + jnp.exp(x["ridge"][0]) * squares, batch["weights"]


def _upper_varying(x: Any, y: Any, batch: Any) -> Any:
    losses, weights = _upper(x, y, batch)
    return losses, weights * jnp.exp(x["ridge"][0] * jnp.tanh(_residual(y, batch)))


def _lower_varying(x: Any, y: Any, batch: Any) -> Any:
    losses, weights = _lower(x, y, batch)
    own = jax.nn.sigmoid(x.get("weight", batch["targets"]))
    return losses, weights * own / (1 + _residual(y, batch) ** 2)


def bilevel_metrics(y: Any, batch: Any) -> dict[str, Any]:
    residual = _residual(y, batch)
    return {"error": (residual**2, batch["weights"]), "far": jnp.abs(residual) > 1}


_DESCENT = bilevel.descent(optax.sgd(0.05, momentum=0.5))
ESTIMATORS = {
    "value_gap": lambda: bilevel.value_gap(_DESCENT, 2, multiplier=4.0),
    "central": lambda: bilevel.value_gap(_DESCENT, 2, central=True),
    "dynamic": lambda: bilevel.value_gap(_DESCENT, 2, multiplier=bilevel.dynamic(0.5)),
    "cg": lambda: bilevel.implicit(_DESCENT, 2, solve=bilevel.cg(3, 0.1)),
    "neumann": lambda: bilevel.implicit(
        _DESCENT, 2, solve=bilevel.neumann(3, 0.05), cross="fd", warm=False
    ),
    "reverse": lambda: bilevel.unroll(_DESCENT, 2),
    "checkpointed": lambda: bilevel.unroll(_DESCENT, 4, checkpoint=True, start="cold"),
    "forward": lambda: bilevel.unroll(_DESCENT, 2, mode="forward"),
    "worst": lambda: bilevel.unroll(_DESCENT, 2, pick="worst", start="learned"),
    "aggregated": lambda: bilevel.unroll(bilevel.aggregate(optax.sgd(0.05)), 2),
}


def two_levels(name: str) -> tuple[Any, Any, Any, Any]:
    """(problem, x, y, estimator); with `_varying` behind its name, weights depend on x and y."""
    estimator = name.removesuffix("_varying")
    losses = (_upper, _lower) if estimator == name else (_upper_varying, _lower_varying)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=_NUM_LOWER).astype(dtype())
    x: Any = {"ridge": rng.normal(size=1).astype(dtype()) - 1}
    y = {"slope": rng.normal(size=_NUM_SLOPES).astype(dtype()), "shift": dtype()(0.3)}
    if estimator not in ("forward", "dynamic"):  # which work with x's numbers at one place
        x["weight"] = bilevel.PerExample(weight)
    if estimator == "worst":
        x = bilevel.Learned(x, y)
    return bilevel.Bilevel(*losses), x, y, ESTIMATORS[estimator]()
