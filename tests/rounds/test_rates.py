"""An update computes the same bits whether its program holds its learning rate or is given it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import schedules
from hetjax.rounds import programs, rates, update

RATE = 1e-3
DECAYING = optax.cosine_decay_schedule(RATE, 70)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "decayed": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.3)),
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(RATE, weight_decay=0.01),
    "clipped": optax.chain(optax.clip_by_global_norm(0.3), optax.adam(RATE)),
    "clipped values": optax.chain(optax.clip(0.07), optax.sgd(0.1)),
    "lamb": optax.lamb(RATE),
    "lion": optax.lion(RATE),
    "rmsprop": optax.rmsprop(RATE),
    "adagrad": optax.adagrad(0.1),
    "adafactor": optax.adafactor(RATE),
    "nadam": optax.nadam(RATE),
    "radam": optax.radam(RATE),
    "yogi": optax.yogi(RATE),
    "scheduled": optax.adam(DECAYING),
    "by progress": optax.chain(optax.scale_by_adam(), schedules.scale_by_progress(DECAYING)),
    "on plateau": optax.chain(optax.adam(RATE), optax.contrib.reduce_on_plateau()),
    "in a branch": optax.apply_if_finite(optax.adam(RATE), 3),
    "every second": optax.MultiSteps(optax.adam(RATE), 2),
    "two factors": optax.chain(optax.scale(0.3), optax.scale(0.7), optax.scale(-0.1)),
}


def point():
    rng = np.random.default_rng(0)
    shapes = {"w": (7, 33), "b": (33,)}
    return {name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()}


def steps_of(optimizer, params, num_steps):
    """The parameters and the state after steps with gradients at random."""

    @jax.jit
    def step(params, state, grads, number, given):
        used = optimizer if given is None else rates.given(optimizer, known, given)
        updates, state = used.update(grads, state, params, value=number, progress=number)
        return optax.apply_updates(params, updates), state

    def run(given):
        rng = np.random.default_rng(1)
        now = params, optimizer.init(params)
        for _ in range(num_steps):
            grads = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(x.dtype), params)
            now = step(*now, grads, np.float32(rng.uniform()), given)
        return jax.device_get(now)

    known = rates.of_update(optimizer, params)
    return run(None), run(jnp.asarray(known, float)), known


@pytest.mark.optimised
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_given_rate_changes_no_bit_of_an_update(name):
    optimizer = update.with_extra_arguments(OPTIMIZERS[name])
    held, given, _ = steps_of(optimizer, point(), 6)
    jax.tree.map(np.testing.assert_array_equal, given, held)


def test_bfloat16_parameters_are_updated_to_the_same_bits():
    optimizer = update.with_extra_arguments(optax.adamw(RATE, weight_decay=0.01))
    params = jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.bfloat16), point())
    held, given, known = steps_of(optimizer, params, 6)
    assert known.size
    jax.tree.map(np.testing.assert_array_equal, given, held)


def test_the_learning_rate_is_found_and_another_one_is_computed_with():
    optimizer = update.with_extra_arguments(optax.sgd(0.1))
    known = rates.of_update(optimizer, point())
    assert known.tolist() == [np.float32(-0.1)]
    other = rates.given(optimizer, known, jnp.asarray([-0.3]))
    made, _ = other.update(point(), optimizer.init(point()), point())
    np.testing.assert_array_equal(made["b"], np.float32(-0.3) * point()["b"])


@pytest.mark.parametrize("name", ["adafactor", "scheduled", "every second", "two factors"])
def test_no_rate_is_taken_where_it_is_not_the_last_factor(name):
    optimizer = update.with_extra_arguments(OPTIMIZERS[name])
    assert not rates.of_update(optimizer, point()).size


def test_an_update_by_another_factor_than_known_stays_as_it_is():
    optimizer = update.with_extra_arguments(optax.sgd(0.1))
    other = rates.given(optimizer, np.array([0.7]), jnp.zeros(1))
    made, _ = other.update(point(), optimizer.init(point()), point())
    np.testing.assert_array_equal(made["b"], np.float32(-0.1) * point()["b"])


def test_a_run_gives_its_rate_and_computes_the_same_bits(monkeypatch):
    data = {"x": np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)}

    def trained():
        optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(RATE))
        return hetjax.fit(
            lambda w, b, rng: (jnp.tanh(b["x"] @ w) - 1) ** 2,
            np.ones(3, np.float32),
            optimizer,
            data,
            workers=2,
            epochs=2,
            microbatch_size=4,
            budget=4,
            progress=False,
        ).params

    asked = []

    def none_of(optimizer, params):
        asked.append(params)
        return np.zeros(0)

    given = trained()
    monkeypatch.setattr(programs.rates, "of_update", none_of)
    held = trained()
    assert asked
    np.testing.assert_array_equal(given, held)
