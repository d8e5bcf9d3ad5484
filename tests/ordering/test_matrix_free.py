"""The gradients of a microbatch's halves: right for every loss, and cheap where that is proven."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from experiments import problems as classifiers
from experiments import tasks
from hetjax import ordering, parts, types
from hetjax.ordering import halves
from hetjax.rounds import gradients as gradients_lib
from hetjax.rounds import losses as losses_lib
from hetjax.rounds import rules
from hetjax.zoo import models
from tests.ordering import hard_losses
from tests.rounds import problems

LOSSES = {**hard_losses.HARD, **hard_losses.EASY}
SIZE = hard_losses.MICROBATCH
# Hard for a person to judge, and yet the derivative of each example's loss is its own.
PROVEN = {
    "position_weights",
    "first_half",
    "batch_size",
    "until_converged",
    "own_derivative",
    "called_back",
}


def first_examples(count=8):
    return {name: x[:count] for name, x in problems.classification(dtype=np.float32).items()}


def refusal(loss_fn, params, examples, *, block_pairs=16, per_example_rng=False):
    """Why not all comes from one forward pass and two halves of a backward pass; or ''."""
    size = len(jax.tree.leaves(examples)[0])
    microbatch = types.Microbatch(np.arange(size, dtype=np.int32), np.ones(size), examples)
    reasons = []

    def trace(params):
        losses = losses_lib.masked(
            loss_fn, microbatch, jax.random.key(0), per_example_rng=per_example_rng
        )
        reasons.append(halves.Microbatch(losses, params, size, block_pairs).refusal)

    jax.eval_shape(trace, params)
    return reasons[0]


def _integers(most, shape):
    return np.random.default_rng(0).integers(most, size=shape, dtype=np.int32)


# By the field of an example that a model takes: its shape, what the model gives, eight examples.
EXAMPLES = {
    "image": ((16, 16, 1), 10, classifiers.images(8, (16, 16, 1))),
    "words": ((50,), 2, {"words": _integers(50, (8, 5)), "label": _integers(2, 8)}),
    "tokens": ((7,), 11, {"tokens": _integers(11, (8, 7))}),
    "past": (
        (20,),
        6,
        {name: np.float32(_integers(9, (8, size))) for name, size in (("past", 20), ("future", 6))},
    ),
}


@functools.cache
def reference(name, dtype):
    """(loss, parameters, examples) of a reference model."""
    kind = models.TAKES[name][0]
    shape, num_outputs, batch = EXAMPLES[kind]
    options = {"input_max": 255.0} if kind == "image" else {}
    model = models.make(name, shape, num_outputs, rngs=nnx.Rngs(0), param_dtype=dtype, **options)
    return *hetjax.nnx_loss(model, tasks.measures_of(kind, num_outputs).loss), batch


# Of all eight examples every model is proven. In smaller blocks those are that have layers which no
# other has, and in blocks of one pair, whose halves are not asked about, those with most kinds.
OF_MODELS = [
    *[(name, 16) for name in models.MODELS],
    *[(name, 2) for name in models.MODELS if name not in ("logistic", "small_cnn")],
    *[(name, 1) for name in ("resnet8", "lstm", "transformer")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block_pairs"), OF_MODELS)
def test_nothing_is_computed_twice_for_the_reference_models(name, block_pairs):
    dtype = jnp.bfloat16 if block_pairs == 2 else jnp.float32
    loss_fn, params, batch = reference(name, dtype)
    assert refusal(loss_fn, params, batch, block_pairs=block_pairs) == ""


class Block(nnx.Module):
    """What models are made of beside convolutions: embedding, attention, norms, dropout."""

    def __init__(self, *, dropout, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5 if dropout else 0.0, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.dense(nnx.gelu(self.dropout(x)).mean(axis=1))


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("per_example_rng", [False, True])
def test_nothing_is_computed_twice_for_a_transformer(dropout, per_example_rng):
    loss_fn, params = hetjax.nnx_loss(
        Block(dropout=dropout, rngs=nnx.Rngs(0)),
        lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
            model(batch["tokens"]), batch["label"]
        ),
    )
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(11, size=(8, 6)), "label": rng.integers(4, size=8)}
    checkpointed = jax.checkpoint(loss_fn)
    assert refusal(loss_fn, params, batch, per_example_rng=per_example_rng) == ""
    if per_example_rng or not dropout:
        assert refusal(checkpointed, params, batch, per_example_rng=per_example_rng) == ""


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
def test_gradients_are_exact_for_every_loss(name, monkeypatch):
    """Without flags nothing of the hard terms can be seen; with them it must be right too."""
    reasons = []

    class Watched(halves.Microbatch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            reasons.append(self.refusal)

    monkeypatch.setattr(halves, "Microbatch", Watched)
    check_exact(hard_losses.with_term(LOSSES[name]), "pair_balance", SIZE // 2)
    (reason,) = reasons  # both microbatches are one program's
    assert (reason == "") == (name in PROVEN or name in hard_losses.EASY), reason


# All three orders take `matrix_free.make_observe`, and differ in what is done between rounds alone.
# So one of them meets every block size, and the others show that they take it, too. A microbatch of
# `indices` or `centred` is one block, whatever is asked for.
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
def test_a_run_whose_flags_come_late_learns_as_any_order_does(method, capsys, tmp_path):
    """512 examples, the first four microbatches without flags: 0.53 where positions are kept."""
    result = hetjax.fit(
        hard_losses.with_term(hard_losses.indices),
        hard_losses.initial_params(),
        optax.sgd(0.1),
        hard_losses.problem(512, 64),
        microbatch_size=16,
        budget=1,
        epochs=30,
        ordering={"method": method, "herding_every": 0},
        cluster={"num_workers": 1},
        local="virtual",
        workdir=tmp_path,
    )
    losses = hard_losses.with_term(hard_losses.indices)(
        result.params, hard_losses.problem(512, 64), None
    )
    assert losses.mean() == pytest.approx(0.342, abs=0.003)
    told = capsys.readouterr().err
    if method == "random_reshuffling":
        assert "backward pass" not in told
        assert "ordering" not in result.summary
        return
    assert f"ordering.method={method!r} takes a backward pass more" in told
    assert "gather: it takes examples by their place in the batch" in told
    assert "hard_losses.py" in told
    reason = result.summary["ordering"]["second_backward_pass"]
    assert reason in told
    assert "takes examples by their place in the batch" in (tmp_path / "report.html").read_text()


def test_nothing_is_said_of_a_loss_that_is_proven(capsys):
    result = problems.fit(
        problems.classification(64, np.float32),
        problems.initial_weights(np.float32),
        ordering={"method": "d_grab", "herding_every": 0},
        epochs=1,
        local="virtual",
    )
    assert "backward pass" not in capsys.readouterr().err
    assert "ordering" not in result.summary


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


@pytest.mark.parametrize(
    "name",
    [n for n, made in ordering.ORDERINGS.items() if "precondition" in parts.options_of(made)],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_order_that_takes_second_moments_says_so(name, num_workers):
    for asked in (False, True):
        order = ordering.ORDERINGS[name](precondition=asked)
        assert order.observer(ordering.Sizes(num_workers, 8, 1)).preconditioned == asked


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
        ordering={"method": method, "herding_every": 0},
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
        ordering={"method": "d_grab_exact", "herding_every": 0},
        local="virtual",
        epochs=1,
    )
