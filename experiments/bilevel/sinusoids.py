"""Few-shot regression of sinusoids: a start from which one step on few points fits a new one.

Tasks are `amplitude sin(x + phase)`, amplitude 0.1 to 5, phase 0 to pi, points in -5 to 5, and
a network of two hidden layers of 40 rectified units, as in MAML's paper (Finn, Abbeel, Levine,
2017, arXiv 1703.03400), with fewer updates of the start than the 70,000 there.

Where the steps are not differentiated, f has half of `proximity` times |y - start|^2 besides, so
that its minimum depends on the start (Rajeswaran, Finn, Kakade, Levine, "Meta-learning with
implicit gradients", 2019, arXiv 1909.04630). A new task is fitted by plain steps down its loss all
the same.

Few-shot learning counts as solved if the median error of new tasks after 10 steps is at most
`MOST_OF_JOINT` of that of joint training of the same seed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bilevel import estimators, networks, one_device, settings
from hetjax import bilevel
from hetjax.bilevel import machine
from hetjax.types import PyTree

RATE = 0.01  # of the steps on a task
NUM_TASKS, NUM_TEST_TASKS = 25, 600
SIZES = (1, 40, 40, 1)
EVALUATED = (0, 1, 5, 10)  # steps
DIVERGED = 100.0  # error of a task; that of answering 0 is below 25
MOST_OF_JOINT = 0.5


class Arm(NamedTuple):
    """A way to learn a start."""

    estimator: bilevel.Estimator
    proximity: float = 0.0  # 0: the estimator learns the start


def _unrolled(num_steps: int, **options: Any) -> Arm:
    lower = bilevel.descent(optax.sgd(RATE))
    return Arm(bilevel.unroll(lower, num_steps, start="learned", **options))


ARMS = {
    "joint training": None,
    "MAML": _unrolled(1),
    "FOMAML": _unrolled(1, back=0),
    "IAPTT": _unrolled(3, pick="worst"),
    "value gap": Arm(
        bilevel.value_gap(
            bilevel.descent(optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(RATE))),
            10,
            multiplier=1.0,
        ),
        proximity=0.5,
    ),
}


def init(seed: int) -> PyTree:
    """The network."""
    return networks.init(SIZES, np.random.default_rng(seed))


def loss(x: PyTree, y: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean square error; of both levels."""
    del x
    inputs, targets = batch
    return jnp.mean((networks.apply(y, inputs) - targets) ** 2)


def tasks(rng: jax.Array, num: int, shots: int, num_query: int) -> bilevel.Batches:
    """Points to fit and others to judge by, leaves `[num, points, 1]`."""
    first, second, third = jax.random.split(rng, 3)
    amplitude = jax.random.uniform(first, (num, 1, 1), minval=0.1, maxval=5.0)
    phase = jax.random.uniform(second, (num, 1, 1), maxval=jnp.pi)
    inputs = jax.random.uniform(third, (num, shots + num_query, 1), minval=-5.0, maxval=5.0)
    both = (inputs, amplitude * jnp.sin(inputs + phase))
    fit = jax.tree.map(lambda leaf: leaf[:, :shots], both)
    judge = jax.tree.map(lambda leaf: leaf[:, shots:], both)
    return bilevel.Batches(upper=judge, lower=fit)


COMPARED = {(arm, shots): 3 for shots in (5, 10) for arm in ARMS if arm != "value gap"}
COMPARED |= {(arm, 10): 5 for arm in ("joint training", "MAML", "value gap")}
"""What `compare_bilevel` compares: (arm, shots), and how many seeds from 0."""


def make_problem(proximity: float) -> bilevel.Bilevel:
    """The loss as both levels; x is the start where there is a proximity, and else unused."""

    def lower(x: PyTree, y: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        if not proximity:
            return loss(x, y, batch)
        away = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), x, y)
        return loss(x, y, batch) + proximity / 2 * jax.tree.reduce(jnp.add, away)

    return bilevel.Bilevel(loss, lower)


def estimate(arm: Arm, start: PyTree, batches: bilevel.Batches) -> machine.Result:
    """The mean hypergradient over tasks, in the start; without a state, since tasks are new."""
    problem = make_problem(arm.proximity)
    x = start if arm.proximity else bilevel.Learned(jnp.zeros(()), start)

    def of_task(batches: bilevel.Batches) -> tuple[PyTree, machine.Info]:
        found = bilevel.hypergradient(problem, arm.estimator, x, start, batches)
        return found.grad_x, found.info._replace(cost=())

    grad_x, info = jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(of_task)(batches))
    cost = machine.cost(arm.estimator.program(x))
    grad = grad_x if arm.proximity else grad_x.start
    return machine.Result(grad, machine.State(()), info._replace(cost=cost))


def gradient(arm: Arm | None, start: PyTree, batches: bilevel.Batches) -> PyTree:
    """Of the mean over tasks, in the start; None: all tasks are fitted at once."""
    if arm is not None:
        return estimate(arm, start, batches).grad_x

    def pooled(start: PyTree) -> jax.Array:
        each = jax.vmap(lambda a, b: (loss((), start, a) + loss((), start, b)) / 2)
        return jnp.mean(each(*batches))

    return jax.grad(pooled)(start)


@functools.partial(jax.jit, static_argnames=("arm", "shots", "num_updates"))
def train(
    arm: Arm | None, start: PyTree, rng: jax.Array, *, shots: int, num_updates: int
) -> PyTree:
    """A start, learned by Adam."""
    tx = optax.adam(1e-3)

    def update(carry: tuple, rng: jax.Array) -> tuple[tuple, None]:
        start, state = carry
        grads = gradient(arm, start, tasks(rng, NUM_TASKS, shots, shots))
        updates, state = tx.update(grads, state)
        return (optax.apply_updates(start, updates), state), None

    return jax.lax.scan(update, (start, tx.init(start)), jax.random.split(rng, num_updates))[0][0]


@functools.partial(jax.jit, static_argnames="shots")
def errors(start: PyTree, rng: jax.Array, rate: float, *, shots: int) -> jax.Array:
    """Mean square error on each new task after 0 to 10 steps, `f[NUM_TEST_TASKS, 11]`."""

    def of_task(batches: bilevel.Batches) -> jax.Array:
        def step(y: PyTree, _: None) -> tuple[PyTree, jax.Array]:
            grads = jax.grad(loss, 1)((), y, batches.lower)
            return jax.tree.map(lambda a, g: a - rate * g, y, grads), loss((), y, batches.upper)

        return jax.lax.scan(step, start, length=max(EVALUATED) + 1)[1]

    return jax.vmap(of_task)(tasks(rng, NUM_TEST_TASKS, shots, 100))


def run(arm: str, shots: int, seed: int, *, num_updates: int) -> dict[str, Any]:
    """A record."""
    first, second = jax.random.split(jax.random.key(seed))
    start = train(ARMS[arm], init(seed), first, shots=shots, num_updates=num_updates)
    found = evaluated(start, second, shots=shots, is_joint=ARMS[arm] is None)
    return {"arm": arm, "seed": seed, "shots": shots, "num_updates": num_updates, **found}


def evaluated(start: PyTree, rng: jax.Array, *, shots: int, is_joint: bool) -> dict[str, Any]:
    """Of new tasks. Joint training gets the best of four rates for its steps on them."""
    rates = (1e-3, 3e-3, 1e-2, 2e-2) if is_joint else (RATE,)
    found = {rate: np.asarray(errors(start, rng, rate, shots=shots)) for rate in rates}
    means = {rate: each.mean(0) for rate, each in found.items()}
    best = min(means, key=lambda rate: float(np.nan_to_num(means[rate][1], nan=np.inf)))
    medians = np.median(np.nan_to_num(found[best], nan=np.inf), 0)
    diverged = np.sum(~(found[best] < DIVERGED), 0)  # those that are no numbers, too
    return {
        "rate": best,
        "errors": {str(k): float(means[best][k]) for k in EVALUATED},
        "medians": {str(k): float(medians[k]) for k in EVALUATED},
        "diverged": {str(k): int(diverged[k]) for k in EVALUATED},
    }


def is_solved(own: dict[str, Any], joint: dict[str, Any]) -> bool:
    """Whether the error after all steps is small enough, beside joint training's."""
    last = str(max(EVALUATED))
    return own["medians"][last] <= MOST_OF_JOINT * joint["medians"][last]


def make(config: settings.TrainConfig) -> one_device.Made:
    """Of the problem few_shot."""
    few, estimator = config.few_shot, config.estimator
    rate = config.lower.learning_rate
    lower = bilevel.descent(estimators.OPTIMIZERS[config.lower.optimizer](rate))
    learned = {"unrolled": {}, "unrolled_worst": {"pick": "worst"}, "first_order": {"back": 0}}
    if estimator.name in learned:
        options = learned[estimator.name]
        arm = Arm(bilevel.unroll(lower, estimator.steps, start="learned", **options))
    else:
        arm = Arm(estimators.make(config), few.proximity)
    start = init(config.seed)
    first, second = jax.random.split(jax.random.key(config.seed))

    def hypergradient(x: PyTree, state: PyTree, key: jax.Array) -> machine.Result:
        del state
        return estimate(arm, x, tasks(key, few.num_tasks, few.shots, few.shots))

    def measure(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, jax.Array]:
        del state
        found = errors(x, key, rate, shots=few.shots)
        return {f"error_after_{k}": jnp.median(found[:, k]) for k in EVALUATED}

    def finish(x: PyTree, state: PyTree, key: jax.Array) -> dict[str, Any]:
        del state, key
        plain = train(None, start, first, shots=few.shots, num_updates=config.upper.steps)
        joint = evaluated(plain, second, shots=few.shots, is_joint=True)
        own = evaluated(x, second, shots=few.shots, is_joint=False)
        return {**own, "joint_training": joint, "solved": is_solved(own, joint)}

    return one_device.Made(start, hypergradient, measure, finish)
