"""The methods by the names of `estimator.name`, each one expression of `hetjax.bilevel`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from experiments.bilevel import settings
from hetjax import bilevel


class Method(NamedTuple):
    title: str  # in reports
    make: Callable[[bilevel.Lower, settings.Estimator, float], bilevel.Estimator]
    """From the lower steps, the options, and the learning rate of the lower steps."""


METHODS: dict[str, Method] = {
    "value_gap": Method(
        "value gap",
        lambda lower, e, rate: bilevel.value_gap(lower, e.steps, multiplier=e.multiplier),
    ),
    "value_gap_central": Method(
        "value gap, central",
        lambda lower, e, rate: bilevel.value_gap(
            lower, e.steps, multiplier=e.multiplier, central=True
        ),
    ),
    "implicit_cg": Method(
        "implicit, conjugate gradients",
        lambda lower, e, rate: bilevel.implicit(
            lower, e.steps, solve=bilevel.cg(e.products, e.damp)
        ),
    ),
    "implicit_neumann": Method(
        "implicit, Neumann",
        lambda lower, e, rate: bilevel.implicit(
            lower, e.steps, solve=bilevel.neumann(e.products, rate, e.damp)
        ),
    ),
    "unrolled": Method(
        "unrolled (RHG)",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, start=e.start),
    ),
    "unrolled_checkpointed": Method(
        "unrolled, checkpointed",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, checkpoint=True, start=e.start),
    ),
    "unrolled_truncated": Method(
        "unrolled, truncated",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, back=e.back, start=e.start),
    ),
    "unrolled_aggregate": Method(
        "unrolled, both losses (BDA)",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, start=e.start),
    ),
    "unrolled_worst": Method(
        "unrolled, worst iterate (IAPTT)",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, start="learned", pick="worst"),
    ),
    "first_order": Method(
        "first order (DARTS)",
        lambda lower, e, rate: bilevel.unroll(lower, e.steps, back=0, start=e.start),
    ),
}
assert tuple(METHODS) == settings.ESTIMATORS

OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "clipped": lambda rate: optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(rate)),
    "adam": optax.adam,
}


def make(config: settings.CleaningConfig) -> bilevel.Estimator:
    """The estimator that a configuration names, around its lower steps."""
    tx = OPTIMIZERS[config.lower.optimizer](config.lower.learning_rate)
    name = config.estimator.name
    lower = bilevel.aggregate(tx) if name == "unrolled_aggregate" else bilevel.descent(tx)
    return METHODS[name].make(lower, config.estimator, config.lower.learning_rate)


def learns_start(config: settings.CleaningConfig) -> bool:
    """Whether the upper variable of cleaning has the start of the lower steps in it."""
    is_cleaning = getattr(config, "problem", "cleaning") == "cleaning"
    return is_cleaning and config.estimator.name == "unrolled_worst"


def make_upper(config: settings.CleaningConfig) -> optax.GradientTransformation:
    """The optimiser of the upper variable, and of a learned start beside weights of examples."""
    upper = config.upper

    def optimizer(rate: float) -> optax.GradientTransformation:
        kind = OPTIMIZERS[upper.optimizer]
        if upper.last_rate == 1:
            return kind(rate)
        return kind(optax.linear_schedule(rate, rate * upper.last_rate, upper.steps))

    if not learns_start(config):
        return optimizer(upper.learning_rate)
    return optax.partition(
        {
            "x": optimizer(upper.learning_rate),
            "start": optimizer(config.estimator.start_learning_rate),
        },
        bilevel.Learned("x", "start"),
    )
