"""Is what `by_rows` concludes about two programs true of their values?"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.ordering import by_rows, row_rules, row_walk

WHOLE, PART, WIDTH = 6, 3, 4


def prove(function, *, whole=WHOLE, part=PART):
    """For `function(x f[B, WIDTH], weights f[WIDTH, WIDTH])`."""
    arguments = [(jnp.zeros((size, WIDTH)), jnp.zeros((WIDTH, WIDTH))) for size in (whole, part)]
    by_rows.prove(
        function, function, tuple(arguments), [by_rows.Rows(0), None], counts=(whole, part)
    )


def rows_of(value, relation, chosen, whole=WHOLE):
    """What the part's value must be, by the relation."""
    if relation is None:
        return value
    axis, shape = relation.axis, value.shape
    inner = shape[axis] // whole if relation.inner is None else relation.inner
    split = value.reshape(*shape[:axis], -1, whole, inner, *shape[axis + 1 :])
    taken = split.take(chosen, axis=axis + 1)
    return taken.reshape(*shape[:axis], -1, *shape[axis + 1 :])


BY_ROWS = {
    "dense": lambda x, w: jnp.tanh(x @ w),
    "dense, examples last": lambda x, w: (w.T @ x.T).T,
    "own row of a matrix": lambda x, w: jax.vmap(lambda row: w @ row)(x),
    "softmax": lambda x, w: jax.nn.softmax(x, axis=1),
    "merged with another axis and split": lambda x, w: (
        jnp.sin(x[:, :, None] * w[None]).reshape(-1, WIDTH) @ w
    ).reshape(-1, WIDTH, WIDTH),
    "merged behind another axis": lambda x, w: (
        (w @ jnp.stack([x.T, x.T], 1).reshape(WIDTH, -1)).reshape(WIDTH, 2, -1).transpose(2, 0, 1)
    ),
    "sorted within": lambda x, w: jnp.sort(x, axis=1)[:, ::-1],
    "argmax within": lambda x, w: w[jnp.argmax(x, axis=1)],
    "taken along": lambda x, w: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
    "top of each": lambda x, w: jax.lax.top_k(x, 2)[0],
    "embedded": lambda x, w: w[jnp.int32(x) % WIDTH],
    "scattered within": lambda x, w: jax.vmap(lambda row: row.at[jnp.argmax(row)].set(0.0))(x),
    "scattered the same way": lambda x, w: jnp.asarray(x).at[:, 1].add(x[:, 0]),
    "sliced at a common place": lambda x, w: jax.lax.dynamic_slice_in_dim(
        x, jnp.argmax(w[0]), 2, axis=1
    ),
    "updated at a common place": lambda x, w: jax.lax.dynamic_update_slice_in_dim(
        x, x[:, :2], jnp.argmax(w[0]), axis=1
    ),
    "cumulated within": lambda x, w: jnp.cumsum(x, axis=1),
    "scan over features": lambda x, w: (
        jax.lax.scan(lambda c, column: (c + column, c * column), jnp.zeros(len(x)), x.T)[1].T
    ),
    "while, by the weights": lambda x, w: jax.lax.while_loop(
        lambda c: c[1] < jnp.sum(w), lambda c: (c[0] * 0.5, c[1] + 1.0), (x, 0.0)
    )[0],
    "branches, by the weights": lambda x, w: jax.lax.cond(
        jnp.sum(w) > 0, jnp.sin, lambda x: x @ w, x
    ),
    "checkpointed": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    "jitted": lambda x, w: jax.jit(lambda x: jnp.where(x > 0, x, 0.0))(x),
    "convolved": lambda x, w: jax.lax.conv_general_dilated(
        x[:, None], w[None, :1], (1,), "SAME", dimension_numbers=("NCH", "IOH", "NCH")
    ),
    "pooled": lambda x, w: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID"),
    "padded": lambda x, w: jnp.pad(x, ((0, 0), (1, 2)))[:, 1:],
    "transformed": lambda x, w: jnp.abs(jnp.fft.fft(x, axis=1)),
    "solved by": lambda x, w: jax.scipy.linalg.solve_triangular(
        jnp.broadcast_to(w + 9 * jnp.eye(WIDTH), (len(x), WIDTH, WIDTH)), x[:, :, None]
    ),
    "a constant": lambda x, w: jnp.ones(len(x)) + jnp.zeros((len(x), WIDTH)).sum(axis=1),
    "positions of features": lambda x, w: x + jax.lax.broadcasted_iota(x.dtype, x.shape, 1),
    "random bits by a key of its own": lambda x, w: jax.vmap(
        lambda row: jax.random.bits(jax.random.fold_in(jax.random.key(0), jnp.int32(row[0])), (3,))
    )(x),
    "of the weights alone": lambda x, w: x + jnp.linalg.inv(w + 9 * jnp.eye(WIDTH)).sum(),
}

NOT_BY_ROWS = {
    "sum": lambda x, w: x - x.sum(axis=0, keepdims=True),
    "largest": lambda x, w: x - x.max(axis=0, keepdims=True),
    "sorted": lambda x, w: jnp.sort(x, axis=0),
    "argmax": lambda x, w: x * jnp.argmax(x, axis=0, keepdims=True).astype(x.dtype),
    "cumulated": lambda x, w: jnp.cumsum(x, axis=0),
    "reversed": lambda x, w: x[::-1],
    "rolled": lambda x, w: jnp.roll(x, 1, axis=0),
    "positions": lambda x, w: x[:, 0] * jnp.arange(len(x), dtype=x.dtype),
    "row by number": lambda x, w: x[jnp.arange(len(x)), 0],
    "the first row": lambda x, w: x - x[:1],
    "a row by the weights": lambda x, w: x - x[jnp.int32(w[0, :1]) % len(x)],
    "written by number": lambda x, w: jnp.zeros_like(x).at[jnp.arange(len(x))].set(x),
    "their number": lambda x, w: x / len(x),
    "scan over the examples": lambda x, w: jax.lax.scan(
        lambda c, row: (c + row, c), jnp.zeros(WIDTH), x
    )[1],
    "each in a scan": lambda x, w: jax.lax.map(jnp.sin, x),
    "while any": lambda x, w: jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x * 0.5, x),
    "branch by any": lambda x, w: jax.lax.cond(jnp.any(x > 1), jnp.sin, jnp.cos, x),
    "transposed blocks": lambda x, w: x.reshape(3, -1, WIDTH).swapaxes(0, 1).reshape(x.shape),
    "read across": lambda x, w: x.T.reshape(x.shape),
    "matrix of all with all": lambda x, w: (x @ x.T).max(axis=1),
    "convolved over the examples": lambda x, w: jnp.convolve(x[:, 0], w[0], mode="same"),
    "pooled over the examples": lambda x, w: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "SAME"
    ),
    "padded": lambda x, w: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "random bits of one key": lambda x, w: x * jax.random.normal(jax.random.key(0), x.shape),
    "checkpointed positions": lambda x, w: jax.checkpoint(
        lambda x: x * jnp.arange(len(x), dtype=x.dtype)[:, None]
    )(x),
    "from the host": lambda x, w: jax.pure_callback(np.sort, x, x),
    "transformed": lambda x, w: jnp.abs(jnp.fft.fft(x, axis=0)),
    "no examples": lambda x, w: w,
    "examples last": lambda x, w: x.T,
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_what_treats_each_example_by_itself_is_proven(name):
    function = BY_ROWS[name]
    prove(function)
    prove(function, whole=8, part=2)
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((WHOLE, WIDTH)), rng.standard_normal((WIDTH, WIDTH))
    chosen = np.array([1, 4, 5])
    x, weights = x.astype(np.float32), weights.astype(np.float32)
    whole, part = np.asarray(function(x, weights)), np.asarray(function(x[chosen], weights))
    np.testing.assert_allclose(part, whole[chosen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_what_may_not_is_refused(name):
    with pytest.raises(by_rows.NotByRowsError):
        prove(NOT_BY_ROWS[name])


def test_the_message_names_the_primitive_and_the_line():
    def loss(x, w):
        return jnp.tanh(jnp.cumsum(x @ w, axis=0))

    with pytest.raises(by_rows.NotByRowsError, match=r"^cumsum: it mixes examples: .*test_by_rows"):
        prove(loss)


def test_another_program_for_fewer_examples_is_refused():
    """Though it may be the same by rows: what runs is not what was looked at."""

    def branches(x, w):
        return jnp.sin(x) if len(x) > PART else jnp.cos(x)

    def constants(x, w):
        return x * np.float32(len(x))

    def in_a_function(x, w):
        return jax.jit(lambda x: x + (1.0 if len(x) > PART else 2.0))(x)

    for function in (branches, constants, in_a_function):
        with pytest.raises(by_rows.NotByRowsError):
            prove(function)


def merged(x, axis):
    """An axis and the next as one."""
    if axis + 1 == x.ndim:
        return x
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def split(x, axis, *sizes):
    if x.shape[axis] % 2:
        return x
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def scanned(x, axis):
    """Totals so far, along an axis."""
    rows = jnp.moveaxis(x, axis, 0)
    totals = jax.lax.scan(lambda c, row: (c + row, c + row), jnp.zeros_like(rows[0]), rows)[1]
    return jnp.moveaxis(totals, 0, axis)


def multiplied(x, axis, weights):
    if x.shape[axis] != WIDTH:
        return x * weights[0, 0]
    return jnp.tanh(jnp.tensordot(x, weights, ((axis,), (0,))))


def by_itself(x, axis, out_axis):
    """`vmap` of a function with a sum over all other axes."""
    return jax.vmap(lambda y: jnp.cos(y) - jnp.broadcast_to(y.sum(), y.shape), axis, out_axis)(x)


# (x, weights, an axis, another one): steps that fit any shape, some of which mix the examples.
STEPS = [
    lambda x, w, i, j: 2 * jnp.sin(x),
    lambda x, w, i, j: x + jnp.flip(x, i),
    lambda x, w, i, j: jnp.cumsum(x, i) / 4,
    lambda x, w, i, j: x - x.max(i, keepdims=True),
    lambda x, w, i, j: jnp.swapaxes(x, i, j),
    lambda x, w, i, j: jnp.moveaxis(x, i, j),
    lambda x, w, i, j: jnp.stack([x, -x], i),
    lambda x, w, i, j: x.sum(i) if x.ndim > 1 else x,
    lambda x, w, i, j: jnp.argmax(x, i).astype(x.dtype) if x.ndim > 1 else x,
    lambda x, w, i, j: jnp.expand_dims(x, i),
    lambda x, w, i, j: merged(x, i),
    lambda x, w, i, j: merged(x, j),
    lambda x, w, i, j: split(x, i, -1, 2),
    lambda x, w, i, j: split(x, i, 2, -1),
    lambda x, w, i, j: jnp.concatenate([x, x * x], i),
    lambda x, w, i, j: jnp.sort(x, i),
    lambda x, w, i, j: jnp.tensordot(x, x, ((i,), (i,))) if x.ndim == 2 else x,
    lambda x, w, i, j: multiplied(x, i, w),
    lambda x, w, i, j: jax.lax.slice_in_dim(x, 0, max(1, x.shape[i] - 1), axis=i),
    lambda x, w, i, j: jnp.roll(x, 1, i),
    lambda x, w, i, j: jnp.take(x, jnp.arange(x.shape[i])[::-1], i),
    lambda x, w, i, j: jnp.take_along_axis(x, jnp.argsort(x, i), j),
    lambda x, w, i, j: x + jax.lax.broadcasted_iota(x.dtype, x.shape, i),
    lambda x, w, i, j: scanned(x, i),
    lambda x, w, i, j: by_itself(x, i, j),
    lambda x, w, i, j: jnp.pad(x, [(1, 0) if k == i else (0, 0) for k in range(x.ndim)]),
    lambda x, w, i, j: x / x.shape[i],
]


def random_program(rng):
    """Four steps, as many with the whole as with the part, at the same axes."""
    numbers = rng.random((4, 3))

    def program(x, weights):
        for kind, one, other in numbers:
            step = STEPS[int(kind * len(STEPS))]
            if math.prod(x.shape) < 5000:
                x = step(x, weights, int(one * x.ndim), int(other * x.ndim))
        return x

    return program


@pytest.mark.parametrize("seed", range(4))
def test_no_conclusion_about_a_random_program_is_wrong(seed):
    """Whatever is concluded of any value, for a random choice of examples."""
    rng = np.random.default_rng(seed)
    concluded = {"same": 0, "rows": 0, "refused": 0}
    with jax.enable_x64(True):
        for _ in range(40):
            program = random_program(rng)
            x, weights = rng.standard_normal((WHOLE, WIDTH)), rng.standard_normal((WIDTH, WIDTH))
            chosen = np.sort(rng.choice(WHOLE, PART, replace=False))
            proof = row_walk.Proof((WHOLE, PART), row_rules.RULES)
            programs = [jax.make_jaxpr(program)(y, weights) for y in (x, x[chosen])]
            try:
                (relation,) = proof.program(*programs, [by_rows.Rows(0), None])
            except by_rows.NotByRowsError:
                concluded["refused"] += 1
                continue
            concluded["same" if relation is None else "rows"] += 1
            whole, part = np.asarray(program(x, weights)), np.asarray(program(x[chosen], weights))
            right = rows_of(whole, relation, chosen)
            np.testing.assert_allclose(part, right, rtol=1e-9, atol=1e-9)
    assert concluded["rows"] >= 3, concluded
    assert concluded["refused"] >= 5, concluded
