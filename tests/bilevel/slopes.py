"""How errors fall: with the steps, with the multiplier, with the distance of differences.

Each function returns the slope that is fitted and the one that theory gives; float64.
"""

from collections.abc import Callable

import numpy as np
import optax
from jax import flatten_util

from hetjax import bilevel
from tests.bilevel import identities, problems, walking

_LOWER = bilevel.descent(optax.sgd(identities.STEP))


def over_steps() -> tuple[float, float]:
    """Of `log |error|` of reverse mode over T: `log rho(I - s A)`."""
    p1 = problems.quadratic()
    steps, errors = (60, 70, 80), []
    for T in steps:
        found = walking.jitted(p1.problem, bilevel.unroll(_LOWER, T), p1.x, p1.y).grad_x
        errors.append(np.log(np.linalg.norm(found - p1.exact)))
    rho = np.abs(1 - identities.STEP * np.linalg.eigvalsh(p1.A)).max()
    return np.polyfit(steps, errors, 1)[0], np.log(rho)


def over_multipliers(*, central: bool) -> tuple[float, float]:
    """Of `log |error|` of a value gap over `log lambda`: -1; -2 where differences are central."""
    p1, errors = problems.quadratic(), []
    multipliers = (200.0, 400.0, 800.0)
    for multiplier in multipliers:
        estimator = bilevel.value_gap(_LOWER, 300, multiplier=multiplier, central=central)
        found = walking.jitted(p1.problem, estimator, p1.x, p1.y).grad_x
        errors.append(np.log(np.linalg.norm(found - p1.exact)))
    return np.polyfit(np.log(multipliers), errors, 1)[0], -2.0 if central else -1.0


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
    "unrolling over T: log rho(I - s A)": over_steps,
    "value gap over lambda": lambda: over_multipliers(central=False),
    "central value gap over lambda": lambda: over_multipliers(central=True),
    "finite differences over their step": over_distances,
}
