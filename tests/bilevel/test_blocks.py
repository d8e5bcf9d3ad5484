"""A batch in blocks, one of which is in memory: the same as the batch as a whole."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import bilevel
from hetjax.bilevel import problem as problem_lib
from tests.bilevel import walking

NUM, SIZE = 12, 3
STEPS = bilevel.descent(optax.sgd(0.2))
ESTIMATORS = {
    "unrolled": bilevel.unroll(STEPS, 4),
    "unrolled, forward": bilevel.unroll(STEPS, 4, mode="forward"),
    "conjugate gradients": bilevel.implicit(STEPS, 4, solve=bilevel.cg(3)),
    "value gap": bilevel.value_gap(STEPS, 4),
}


Rows = collections.namedtuple("Rows", "inputs labels index")  # [n, 4], i[n], i[n]


def losses(y, batch):
    scores = jax.nn.log_softmax(batch.inputs @ y, axis=-1)
    return -jnp.take_along_axis(scores, batch.labels[:, None], axis=-1)[:, 0]


def lower(x, y, batch):
    weights = jax.nn.sigmoid(x["weights"][batch.index])
    ridge = jnp.exp(x["log_ridge"]) / 2 * jnp.sum(y**2)
    return jnp.mean(weights * losses(y, batch)) + ridge


def upper(x, y, batch):
    return jnp.mean(losses(y, batch)) + 0.1 * jnp.mean(x["weights"] ** 2)


PROBLEM = bilevel.Bilevel(upper, lower)


def made(num=NUM, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = {"weights": rng.normal(size=num).astype(dtype), "log_ridge": dtype(-2.0)}

    def rows():
        inputs = rng.normal(size=(num, 4)).astype(dtype)
        return Rows(inputs, rng.integers(0, 3, num), np.arange(num))

    return x, rng.normal(size=(4, 3)).astype(dtype), bilevel.Batches(rows(), rows())


def in_blocks(batches, size=SIZE):
    return bilevel.Batches(*(bilevel.Blocks.of(batch, size) for batch in batches))


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_blocks_have_the_hypergradient_of_the_whole(name, float64):
    x, y, batches = made()
    whole = walking.jitted(PROBLEM, ESTIMATORS[name], x, y, batches)
    cut = walking.jitted(PROBLEM, ESTIMATORS[name], x, y, in_blocks(batches))
    assert walking.apart(whole, cut) < 1e-12
    assert cut.info.cost == whole.info.cost  # in batches
    uneven = bilevel.Batches(batches.upper, bilevel.Blocks.of(batches.lower, 1))
    assert walking.apart(whole, walking.jitted(PROBLEM, ESTIMATORS[name], x, y, uneven)) < 1e-12


def test_each_request_of_a_stack_takes_its_blocks(float64):
    x, y, batches = made()
    rng, estimator = np.random.default_rng(3), ESTIMATORS["unrolled"]
    rows = [rng.permutation(NUM)[:6] for _ in range(4)]
    lowers = jax.tree.map(lambda leaf: np.stack([leaf[at] for at in rows]), batches.lower)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(4, 2, SIZE, *leaf.shape[2:]), lowers)
    whole = bilevel.Batches(batches.upper, bilevel.Stack(lowers))
    cut = bilevel.Batches(batches.upper, bilevel.Stack(bilevel.Blocks(blocks)))
    found = walking.jitted(PROBLEM, estimator, x, y, cut)
    assert walking.apart(walking.jitted(PROBLEM, estimator, x, y, whole), found) < 1e-12
    once = bilevel.Batches(batches.upper, jax.tree.map(lambda leaf: leaf[0], lowers))
    assert walking.apart(walking.jitted(PROBLEM, estimator, x, y, once), found) > 1e-3


def test_half_precision_is_summed_in_float32():
    """512 blocks of 1 + 2^-7: in bfloat16 their sum would stop at 256."""
    problem = bilevel.Bilevel(upper, lambda x, y, batch: jnp.sum(y) * batch[0])
    at = problem_lib.At(jnp.bfloat16(0), jnp.bfloat16(1))
    what = problem_lib.What(problem_lib.Kind.GRADIENT, problem_lib.LOWER)
    blocks = bilevel.Blocks(jnp.full((512, 1), 1 + 2**-7, jnp.bfloat16))
    found = problem_lib.answer(problem, what, at, blocks)
    assert found.y.dtype == jnp.bfloat16
    assert float(found.y) == float(found.loss) == 1 + 2**-7


def test_only_one_block_is_in_memory():
    """Logits and their copies are of a block: a tenth of the examples, a tenth of what is left."""
    x, y, batches = made(num=20_000, dtype=np.float32)

    def planned(batches):
        def call(x, y, batches):
            return bilevel.hypergradient(PROBLEM, ESTIMATORS["value gap"], x, y, batches)

        return jax.jit(call).lower(x, y, batches).compile().memory_analysis().temp_size_in_bytes

    of_x = 20_000 * 4  # bytes; x, its gradients and their sums are as long as the training set
    whole, cut = planned(batches), planned(in_blocks(batches, 100))
    assert whole > 8 * of_x
    assert cut < 5 * of_x


@pytest.mark.parametrize(
    ("batch", "size", "words"),
    [
        (np.zeros(12), 5, r"Blocks\.of: size is 5"),
        ((np.zeros(3), np.zeros((4, 2))), 1, r"leading axes are \[3, 4\]"),
        (bilevel.Stack(np.zeros((3, 4))), 2, r"Blocks\.of: got a Stack"),
        ((np.zeros((3, 2)), np.float32(1)), None, r"axes are \[0, 3\]"),
        ((), None, r"Blocks: leading axes are \[\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, size, words):
    with pytest.raises(ValueError, match=words):
        bilevel.Blocks.of(batch, size) if size else bilevel.Blocks(batch).num_blocks


def test_a_block_that_is_not_finite_is_named():
    x, y, batches = made(dtype=np.float32)
    inputs = batches.lower.inputs.copy()
    inputs[7] = np.nan
    wrong = in_blocks(batches._replace(lower=batches.lower._replace(inputs=inputs)))
    said = bilevel.explain(PROBLEM, ESTIMATORS["unrolled"], x, y, wrong)
    assert said.startswith("request 0, gradient of the lower level on batch 0, block 2 of 4: ")
