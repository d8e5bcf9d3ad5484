"""Balancing without gradients of single examples: signs, changes, updates are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax import ordering, types
from hetjax.local import gradients as gradients_lib
from hetjax.local import rules
from tests.rounds import problems

SIZE, FEATURES, CLASSES = 16, 12, 5


def bits(rng, like):
    return jax.random.bits(rng, like.shape, jnp.uint8) < 128


def by_position(logits, batch, rng):
    """Each row by its number, as in NumPy."""
    return -jax.nn.log_softmax(logits)[jnp.arange(SIZE), batch["y"]]


def centred(logits, batch, rng):
    """Less the mean of the microbatch."""
    return (logits[:, 0] - logits[:, 0].mean()) ** 2


def loop(logits, batch, rng):
    def step(i, out):
        return out.at[i].set(jnp.tanh(logits[i]).sum())

    return jax.lax.fori_loop(0, SIZE, step, jnp.zeros(SIZE))


def masked_bits(logits, batch, rng):
    """Dropout with one key a microbatch: the bits are kept for the backward pass."""
    return (jnp.tanh(logits) * bits(rng, logits)).sum(axis=1)


def dropped(logits, batch, rng):
    """Dropout inside `jax.checkpoint`: the bits are made anew in the backward pass."""
    return jax.checkpoint(lambda logits: masked_bits(logits, batch, rng))(logits)


@pytest.mark.parametrize(
    ("term", "block_pairs", "method", "num_workers"),
    [
        *((term, SIZE // 2, "pair_balance", 1) for term in (by_position, centred, loop, dropped)),
        *((masked_bits, block_pairs, "d_grab", 2) for block_pairs in (1, 2, 3)),
        (by_position, 2, "pair_balance", 2),
        (masked_bits, 3, "frozen", 2),
    ],
)
def test_update_and_running_sum_are_those_of_the_gradients(term, block_pairs, method, num_workers):
    """To 1e-6 those of each example's loss, beside the others, one by one."""
    rng = np.random.default_rng(5)
    examples = {
        "x": rng.standard_normal((SIZE, FEATURES)).astype(np.float32),
        "y": rng.integers(CLASSES, size=SIZE),
    }
    params, running_sum = rng.standard_normal((2, FEATURES, CLASSES)).astype(np.float32)

    def loss_fn(params, batch, rng):
        return term(batch["x"] @ params, batch, rng)

    sizes = ordering.Sizes(num_workers, SIZE, 1)
    observer = ordering.ORDERINGS[method](block_pairs=block_pairs).observer(sizes)
    assert (observer.sizes is None) == (method == "pair_balance")  # else of so many workers alone
    steps = rules.with_observer(gradients_lib.gradient_sums(loss_fn), observer)
    ids, key, shared = np.arange(SIZE, dtype=np.int32), jax.random.key(0), types.Shared(params)
    microbatch = types.Microbatch(ids, np.ones(SIZE, np.float32), examples)
    after, signs = jax.jit(steps.add)(shared, steps.begin(shared, (), running_sum), microbatch, key)
    own_key = jax.random.fold_in(key, ids[0])
    rows = np.asarray(jax.jacobian(loss_fn)(params, examples, own_key), np.float64)
    signed = np.tensordot(np.asarray(signs, np.float64), rows, axes=1)
    change = after.evidence - running_sum
    for found, right in ((after.sums.grad_sum, rows.sum(axis=0)), (change, signed)):
        assert np.linalg.norm(found - right) <= 1e-6 * np.linalg.norm(right)


def fit(**fields):
    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    return problems.fit(data, weights, epochs=1, **fields)


@pytest.mark.parametrize(("block_pairs", "told"), [(2, ""), (1, "takes 2 backward passes")])
def test_blocks_that_take_more_backward_passes_are_said(block_pairs, told, capsys):
    fit(ordering={"method": "d_grab", "block_pairs": block_pairs}, local="virtual")
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


def test_a_forward_derivative_that_is_missing_is_said():
    @jax.custom_vjp
    def halved(x):
        return x / 2

    halved.defvjp(lambda x: (x / 2, ()), lambda _, g: (g / 2,))

    def loss_fn(weights, batch, rng):
        return halved(problems.softmax_loss(weights, batch, rng))

    with pytest.raises(ValueError, match=r"'d_grab' cannot work .*custom_vjp"):
        fit(loss_fn=loss_fn, ordering="d_grab")
    fit(loss_fn=loss_fn, ordering="d_grab_exact", local="virtual")
