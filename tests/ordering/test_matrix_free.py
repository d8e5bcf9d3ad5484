"""Balancing without gradients of single examples: signs, changes, updates are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import ordering, parts, types
from hetjax.local import gradients as gradients_lib
from hetjax.local import rules
from tests.ordering import hard_losses
from tests.rounds import problems

LOSSES = {**hard_losses.HARD, **hard_losses.EASY}
SIZE = hard_losses.MICROBATCH


@functools.cache
def flagged():
    """Two microbatches: without a flag, and with."""
    data = hard_losses.problem(4 * SIZE, 2 * SIZE)
    return [{name: x[start : start + SIZE] for name, x in data.items()} for start in (0, 3 * SIZE)]


def exact_gradients(loss_fn, params, examples, key):
    """f[B, ...]: of each example's loss, beside the others, one by one."""

    def of_one(position):
        return jax.grad(lambda p: loss_fn(p, examples, key)[position])(params)["weights"]

    return jax.lax.map(of_one, jnp.arange(SIZE))


def check_exact(loss_fn, method, block_pairs, *, num_workers=1):
    """Update and running sum of the local phase, on both microbatches, to 1e-6."""
    factory = ordering.ORDERINGS[method]
    options = {"block_pairs": block_pairs} if "block_pairs" in parts.options_of(factory) else {}
    observer = factory(**options).observer(ordering.Sizes(num_workers, SIZE, 1))
    steps = rules.with_observer(gradients_lib.gradient_sums(loss_fn), observer)
    add = jax.jit(steps.add)
    gradients = jax.jit(functools.partial(exact_gradients, loss_fn))
    params, rng = hard_losses.initial_params(), jax.random.key(0)
    running_sum = jax.tree.map(
        lambda x: np.random.default_rng(5).standard_normal(x.shape).astype(x.dtype), params
    )
    for number, examples in enumerate(flagged()):
        ids = SIZE * number + np.arange(SIZE, dtype=np.int32)
        shared = types.Shared(params)
        after, example_signs = add(
            shared,
            steps.begin(shared, (), running_sum),
            types.Microbatch(ids, np.ones(SIZE, np.float32), examples),
            rng,
        )
        key = jax.random.fold_in(rng, ids[0])
        rows = np.asarray(gradients(params, examples, key), np.float64)
        signed = np.tensordot(np.asarray(example_signs, np.float64), rows, axes=1)
        change = after.evidence["weights"] - running_sum["weights"]
        for found, right in ((after.sums.grad_sum["weights"], rows.sum(axis=0)), (change, signed)):
            assert np.linalg.norm(found - right) <= 1e-6 * np.linalg.norm(right)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_exact_for_every_loss(name):
    """Without flags nothing of the hard terms can be seen; with them it must be right too."""
    check_exact(hard_losses.with_term(LOSSES[name]), "pair_balance", SIZE // 2)


# All three orders take `matrix_free.make_observe`, and differ in what is done between rounds alone.
# So one of them meets every block size, and the others show that they take it, too.
ORDERS = [
    *[
        (name, block_pairs, "d_grab")
        for name in ("position_weights", "by_vmap", "masked_bits")
        for block_pairs in (1, 2, 3)
    ],
    ("indices", 3, "d_grab"),
    ("centred", 1, "d_grab"),
    ("position_weights", 2, "pair_balance"),
    ("masked_bits", 3, "frozen"),
]


@pytest.mark.parametrize(("name", "block_pairs", "method"), ORDERS)
def test_gradients_are_exact_for_every_order_and_block_size(name, method, block_pairs):
    loss_fn = hard_losses.with_term(LOSSES[name])
    check_exact(loss_fn, method, block_pairs, num_workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random_reshuffling", "pair_balance", "d_grab"])
def test_a_run_whose_flags_come_late_learns_as_any_order_does(method):
    """512 examples, the first four microbatches without flags: 0.53 where positions are kept."""
    result = hetjax.fit(
        hard_losses.with_term(hard_losses.indices),
        hard_losses.initial_params(),
        optax.sgd(0.1),
        hard_losses.problem(512, 64),
        microbatch_size=16,
        budget=1,
        epochs=30,
        ordering={"method": method},
        cluster={"num_workers": 1},
        local="virtual",
    )
    losses = hard_losses.with_term(hard_losses.indices)(
        result.params, hard_losses.problem(512, 64), None
    )
    assert losses.mean() == pytest.approx(0.342, abs=0.003)


@pytest.mark.parametrize(("block_pairs", "told"), [(16, ""), (2, ""), (1, "into 2 blocks")])
def test_blocks_that_take_more_backward_passes_are_said(block_pairs, told, capsys):
    problems.fit(
        problems.classification(64, np.float32),
        problems.initial_weights(np.float32),
        ordering={"method": "d_grab", "block_pairs": block_pairs},
        epochs=1,
        local="virtual",
    )
    said = capsys.readouterr().err
    assert told in said
    assert ("block_pairs=2 takes one" in said) == bool(told)


def of_two_leaves(params, batch, rng):
    """With gradients x of the one leaf, and z of the other."""
    return batch["x"] @ params["w"] + batch["z"] * params["b"]


@pytest.mark.parametrize(
    ("w", "b"), [([0, 0, 0], 0), ([0, 0, 0], 3e6), ([1e6, -2e6, 5e5], 0), ([1, 2, -1], 0.5)]
)
def test_signs_in_half_precision_are_those_of_the_running_sum(w, b):
    """Of nothing yet, of sums beyond the type's range in one of the leaves, and of usual ones."""
    rng, running_sum = np.random.default_rng(3), {"w": np.float32(w), "b": np.float32(b)}
    examples = {name: rng.integers(-4, 5, (8, 3)[: 1 + (name == "x")]) for name in ("x", "z")}
    dots = examples["x"] @ np.float64(w) + examples["z"] * np.float64(b)
    sign = np.where(dots[::2] <= dots[1::2], 1, -1)
    observer = ordering.pair_balance(block_pairs=4).observer(ordering.Sizes(1, 8, 1))
    steps = rules.with_observer(gradients_lib.gradient_sums(of_two_leaves), observer)
    shared = types.Shared({"w": jnp.ones(3, jnp.float16), "b": jnp.ones((), jnp.float16)})
    examples = {name: np.float16(value) for name, value in examples.items()}
    microbatch = types.Microbatch(np.arange(8, dtype=np.int32), np.ones(8, np.float32), examples)
    begun = steps.begin(shared, (), running_sum)
    _, signs = jax.jit(steps.add)(shared, begun, microbatch, jax.random.key(0))
    np.testing.assert_array_equal(signs, np.stack([sign, -sign], axis=1).ravel())


def last_token(params, batch, rng):
    """Takes each example's row by its absolute position, below a head of zeros."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"])
    taken = hidden[jnp.arange(len(batch["y"])), batch["y"]]
    return (taken * params["head"] - 1) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random_reshuffling", "d_grab"])
def test_such_a_loss_trains_as_it_should(method, float64):
    """The whole of the data in a round: no order matters."""
    data = problems.classification(64)
    params = {"hidden": problems.initial_weights(), "head": np.zeros(())}
    result = problems.fit(
        data,
        params,
        loss_fn=last_token,
        local="virtual",
        epochs=20,
        budget=16,
        ordering={"method": method},
    )
    expected = params
    optimizer = optax.sgd(0.3, momentum=0.9)
    state = optimizer.init(expected)
    gradient = jax.jit(jax.grad(lambda p: last_token(p, data, None).mean()))
    for _ in range(20):
        grads = gradient(expected)
        updates, state = optimizer.update(grads, state)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), result.params, expected)


def test_a_forward_derivative_that_is_missing_is_said():
    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(lambda x: (x / 2, ()), lambda _, g: (g / 2,))

    def loss_fn(weights, batch, rng):
        return halved(problems.softmax_loss(weights, batch, rng))

    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    with pytest.raises(ValueError, match=r"'d_grab' cannot work .*custom_vjp"):
        problems.fit(data, weights, loss_fn=loss_fn, ordering={"method": "d_grab"}, epochs=1)
    problems.fit(
        data,
        weights,
        loss_fn=loss_fn,
        ordering={"method": "d_grab_exact"},
        local="virtual",
        epochs=1,
    )
