"""How errors fall: with the multiplier, with the distance of differences.

Each function returns the slope that is fitted and the one that theory gives; float64.
"""

from collections.abc import Callable

import numpy as np
import optax
from jax import flatten_util

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

_LOWER = bilevel.descent(optax.sgd(identities.STEP))


def over_multipliers() -> tuple[float, float]:
    """Of `log |error|` of a central value gap over `log lambda`: -2; of another it is -1."""
    p1, errors = problems.quadratic(), []
    multipliers = (200.0, 400.0, 800.0)
    for multiplier in multipliers:
        estimator = bilevel.value_gap(_LOWER, 300, multiplier=multiplier, central=True)
        found = walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x
        errors.append(np.log(np.linalg.norm(found - p1.exact)))
    return np.polyfit(np.log(multipliers), errors, 1)[0], -2.0


def over_distances() -> tuple[float, float]:
    """Of `log |error|` of finite differences over the log of their step: 2. On the MLP."""
    case = problems.mlp()

    def found(**cross):
        estimator = bilevel.implicit(_LOWER, 3, solve=bilevel.scaled(0.5), **cross)
        result = walking.jitted(case.problem, estimator, case.x, case.y)
        return flatten_util.ravel_pytree(result.grad_x)[0]

    distances, exact = (0.1, 0.05, 0.025), found()
    errors = [np.linalg.norm(found(cross="fd", fd_step=d) - exact) for d in distances]
    return np.polyfit(np.log(distances), np.log(errors), 1)[0], 2.0


SLOPES: dict[str, Callable[[], tuple[float, float]]] = {
    "central value gap over lambda": over_multipliers,
    "finite differences over their step": over_distances,
}
