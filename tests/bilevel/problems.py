"""Small bilevel problems whose answers are known, in NumPy; P1 to P3, P5, an MLP, cleaning.

Their numbers are float64: call them where 64-bit numbers are on. A batch of P1 shifts the lower
minimum, so that a test sees which batch a request took.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import bilevel


class Quadratic(NamedTuple):
    """P1: `f = y'Ay/2 - (Bx + c + batch)'y`, `F = |y - t|^2/2 + rho |x|^2/2`."""

    A: np.ndarray
    B: np.ndarray
    c: np.ndarray
    t: np.ndarray
    x: np.ndarray
    y: np.ndarray
    rho: float = 0.3

    @property
    def problem(self) -> bilevel.Bilevel:
        def upper(x, y, batch):
            t = self.t if batch is None else self.t + batch
            return 0.5 * jnp.sum((y - t) ** 2) + 0.5 * self.rho * jnp.sum(x**2)

        def lower(x, y, batch):
            c = self.c if batch is None else self.c + batch
            return 0.5 * y @ (self.A @ y) - (self.B @ x + c) @ y

        return bilevel.Bilevel(upper, lower)

    @property
    def best(self) -> np.ndarray:
        """y*(x)."""
        return np.linalg.solve(self.A, self.B @ self.x + self.c)

    @property
    def exact(self) -> np.ndarray:
        """The gradient of `F(x, y*(x))`."""
        return self.through(self.best - self.t)

    def through(self, upper: np.ndarray, matrix: np.ndarray | None = None) -> np.ndarray:
        """`rho x + B' matrix^{-1} upper`; matrix is A by default."""
        solved = np.linalg.solve(self.A if matrix is None else matrix, upper)
        return self.rho * self.x + self.B.T @ solved

    def descended(self, num_steps: int, step: float) -> np.ndarray:
        """y_T of gradient descent from y."""
        y = self.y
        for _ in range(num_steps):
            y = y - step * (self.A @ y - self.B @ self.x - self.c)
        return y

    def unrolled(self, num_steps: int, step: float) -> np.ndarray:
        """The gradient of `F(x, y_T(x))`."""
        eye = np.eye(len(self.y))
        power = np.linalg.matrix_power(eye - step * self.A.T, num_steps)
        return self.through((eye - power) @ (self.descended(num_steps, step) - self.t))

    def penalised(self, multiplier: float) -> np.ndarray:
        """The minimum in y of `F + lambda f`."""
        eye = np.eye(len(self.y))
        right = self.t + multiplier * (self.B @ self.x + self.c)
        return np.linalg.solve(eye + multiplier * self.A, right)


def quadratic(y_size: int = 5, x_size: int = 3) -> Quadratic:
    """P1, with eigenvalues of A from 0.5 to 2."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(y_size, y_size)))
    curvatures = np.concatenate([[0.5], np.linspace(1.0, 2.0, y_size - 1)])
    return Quadratic(
        basis @ np.diag(curvatures) @ basis.T,
        rng.normal(size=(y_size, x_size)),
        *(rng.normal(size=size) for size in (y_size, y_size, x_size, y_size)),
    )


class Case(NamedTuple):
    """A problem with a point of it."""

    problem: bilevel.Bilevel
    x: dict
    y: dict


@functools.cache
def mlp() -> Case:
    """A network of two layers: x holds the decay of either, a shift of the inputs, a log rate."""
    rng = np.random.default_rng(1)
    inputs, labels = rng.normal(size=(2, 12, 4)), rng.integers(0, 3, size=(2, 12))

    def loss(x, y, part):
        hidden = jnp.tanh((inputs[part] + x["shift"][None]) @ y["in"] + y["bias"][None])
        scores = jax.nn.log_softmax(hidden @ y["out"])
        return -jnp.mean(scores[np.arange(12), labels[part]])

    def lower(x, y, batch):
        del batch
        decay = jnp.exp(x["decay"])
        squares = decay[0] * jnp.sum(y["in"] ** 2) + decay[1] * jnp.sum(y["out"] ** 2)
        return loss(x, y, 0) + squares

    def upper(x, y, batch):
        del batch
        return loss(x, y, 1) + 0.1 * jnp.sum(x["shift"] ** 2)

    x = {"decay": np.array([-3.0, -2.5]), "shift": 0.1 * rng.normal(size=4), "rate": np.array(-1.0)}
    y = {"in": 0.5 * rng.normal(size=(4, 3)), "bias": 0.1 * rng.normal(size=3)}
    y["out"] = 0.5 * rng.normal(size=(3, 3))
    return Case(bilevel.Bilevel(upper, lower), x, y)


class Cleaning(NamedTuple):
    """A weight `sigmoid(x_i)` for each example; both means are over the number of examples."""

    inputs: np.ndarray  # [2, n, d], of the lower level and of the upper one
    labels: np.ndarray  # i[2, n]
    x: np.ndarray  # [n]
    y: np.ndarray  # [d, classes]
    ridge: float = 0.1

    def losses(self, y, part: int):
        """Of each example, [n]."""
        scores = jax.nn.log_softmax(self.inputs[part] @ y)
        return -scores[np.arange(self.labels.shape[1]), self.labels[part]]

    @property
    def problem(self) -> bilevel.Bilevel:
        num = self.labels.shape[1]

        def lower(x, y, batch):
            del batch
            weighted = jnp.sum(jax.nn.sigmoid(x) * self.losses(y, 0))
            return weighted / num + 0.5 * self.ridge * jnp.sum(y**2)

        def upper(x, y, batch):
            del x, batch
            return jnp.sum(self.losses(y, 1)) / num

        return bilevel.Bilevel(upper, lower)


def cleaning() -> Cleaning:
    rng = np.random.default_rng(2)
    inputs, labels = rng.normal(size=(2, 10, 4)), rng.integers(0, 3, size=(2, 10))
    return Cleaning(inputs, labels, rng.normal(size=10), 0.3 * rng.normal(size=(4, 3)))


# --- Scalar problems; their y is of one or two numbers ---


def many_minima() -> bilevel.Bilevel:
    """P2: `F = (x - y2)^2/2 + (y1 - 1)^2/2`, `f = y1^2/2 - x y1`; x = 1, y = (1, 1), F = 0."""
    return bilevel.Bilevel(
        lambda x, y, batch: 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2,
        lambda x, y, batch: 0.5 * y[0] ** 2 - x * y[0],
    )


def sine(a: float = 2.0, c: float = 2.0) -> bilevel.Bilevel:
    """P3: `F = (x - a)^2 + (y - a - c)^2`, `f = sin(x + y - c)`.

    With a = c = 2 the best is x = 3 pi / 4, y = x + 2, where F = (3 pi / 2 - 4)^2 / 2.
    """
    return bilevel.Bilevel(
        lambda x, y, batch: (x - a) ** 2 + (y - a - c) ** 2,
        lambda x, y, batch: jnp.sin(x + y - c),
    )


def dominated() -> bilevel.Bilevel:
    """P5: `f = (x + y)^2 + x sin^2(x + y)`, x in [0, 3]: not convex in y, and all minima are -x.

    With `F = (y + 1)^2 / 2 + (x - 2)^2 / 2` the best is x = 1.5, y = -1.5, where F = 1 / 4.
    """
    return bilevel.Bilevel(
        lambda x, y, batch: 0.5 * (y + 1) ** 2 + 0.5 * (x - 2) ** 2,
        lambda x, y, batch: (x + y) ** 2 + x * jnp.sin(x + y) ** 2,
    )
