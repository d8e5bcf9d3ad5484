"""Every module of Flax NNX: unequal workers train it as a plain loop does, or say why."""

import importlib
import pkgutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hetjax
from tests.models import plain_loops
from tests.models.plain_loops import F64

DATA = plain_loops.examples()


# --- NNX: a name, how it is made, and how it is called ---


def on(field):
    return lambda module, batch: module(batch[field])


def of_mask(module, batch):
    x = batch["x"]
    return module(x, mask=x > x.min((1, 2), keepdims=True))


def in_sequence(module, batch):
    return module(batch["x"], seq_lengths=batch["lengths"])


def random_carry(module, batch):
    shape = (len(batch["x"]), 4)
    carry = module.cell.initialize_carry(shape, module.rngs, carry_init=plain_loops.normal)
    return module(batch["x"], initial_carry=carry)


def copied(module, batch):
    copy = nnx.clone(module)
    out = copy(batch["x"])
    nnx.update(module, nnx.state(copy, nnx.BatchStat))
    return out


def attended(module, batch):
    return module(batch["x"], mask=nnx.make_causal_mask(batch["ids"]))


def cell(made, **more):
    return lambda r: nnx.RNN(made(4, 3, rngs=r, **F64, **more), rngs=r)


def two_ways(r):
    return nnx.Bidirectional(cell(nnx.GRUCell)(r), cell(nnx.LSTMCell)(r), rngs=r)


def linear(r):
    return nnx.Linear(4, 4, rngs=r, **F64)


@nnx.vmap(in_axes=0, out_axes=0)
def layers(rngs):
    return nnx.Sequential(linear(rngs), nnx.Dropout(0.5, rngs=rngs))


def squares(grads, batch):
    return [jnp.ones(len(batch["x"])) * (leaf**2).mean() / 99 for leaf in jax.tree.leaves(grads)]


@nnx.custom_vjp
def doubled(module, x):
    return module(x)


def doubled_forwards(module, x):
    return module(x), (module, x)


def doubled_backwards(kept, g):
    (of_module, _), g = g
    return jax.tree.map(lambda leaf: 2 * jnp.ones_like(leaf) * g.sum(), of_module), g


doubled.defvjp(doubled_forwards, doubled_backwards)


class Perturbed(nnx.Module):
    def __init__(self, rngs):
        self.linear = linear(rngs)
        self.noise = nnx.Perturbation(jnp.ones((1, 1, 4)))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "features", x)
        return self.linear(x + self.noise[...])


class Average(nnx.Variable):
    """A kind of one's own."""


class Averaged(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.mean = linear(rngs), Average(jnp.zeros((1, 1, 4)))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1), keepdims=True)
        return self.linear(x - self.mean[...])


TRAINING = {"deterministic": False, "decode": False}
LORA = {"b_initializer": plain_loops.normal}


def made(kind, *args, **more):
    return lambda r: kind(*args, **more, rngs=r, **F64)


NNX = {
    "linear": {
        "Linear": (made(nnx.Linear, 4, 3), on("x")),
        "LinearGeneral": (made(nnx.LinearGeneral, (3, 4), (2, 2), axis=(1, 2)), on("x")),
        "Einsum": (made(nnx.Einsum, "btf,fg->btg", (4, 2), (2,)), on("x")),
        "Embed": (made(nnx.Embed, 5, 3), on("ids")),
        "LoRA": (made(nnx.LoRA, 4, 2, 3, **LORA), on("x")),
        "LoRALinear": (
            made(nnx.LoRALinear, 4, 3, lora_rank=2, lora_param_dtype=float, **LORA),
            on("x"),
        ),
        "PReLU": (lambda r: nnx.PReLU(param_dtype=jnp.float64), on("x")),
        "Conv": (made(nnx.Conv, 2, 3, (3, 3), strides=2), on("image")),
        "ConvTranspose": (made(nnx.ConvTranspose, 2, 3, (2, 2)), on("image")),
    },
    "norms": {
        "LayerNorm": (made(nnx.LayerNorm, 4), of_mask),
        "RMSNorm": (made(nnx.RMSNorm, 4), of_mask),
        "GroupNorm": (made(nnx.GroupNorm, 4, 2), of_mask),
        "InstanceNorm": (made(nnx.InstanceNorm, 4), of_mask),
        "WeightNorm": (lambda r: nnx.WeightNorm(linear(r), rngs=r, **F64), copied),
    },
    "state": {
        "BatchNorm": (made(nnx.BatchNorm, 4, momentum=0.9), of_mask),
        "SpectralNorm": (lambda r: nnx.SpectralNorm(linear(r), rngs=r, **F64), copied),
        "a kind of one's own": (Averaged, on("x")),
    },
    "random": {
        "Dropout": (lambda r: nnx.Sequential(linear(r), nnx.Dropout(0.5, rngs=r)), on("x")),
        "MultiHeadAttention": (
            made(nnx.MultiHeadAttention, 2, 4, dropout_rate=0.3, **TRAINING),
            attended,
        ),
        "Sequential": (
            lambda r: nnx.Sequential(*(nnx.Dropout(0.5, rngs=r) for _ in range(2)), linear(r)),
            on("x"),
        ),
        "List": (lambda r: nnx.List([linear(r), linear(r)]), lambda m, b: m[1](m[0](b["x"]))),
        "RoPE": (lambda r: nnx.Sequential(linear(r), nnx.RoPE(10.0, 4, 3)), on("x")),
    },
    "recurrent": {
        "LSTMCell": (cell(nnx.LSTMCell), on("x")),
        "OptimizedLSTMCell": (cell(nnx.OptimizedLSTMCell), in_sequence),
        "SimpleCell": (cell(nnx.SimpleCell, dtype=float), random_carry),
        "GRUCell": (cell(nnx.GRUCell), on("x")),
        "RNN": (
            lambda r: nnx.RNN(nnx.GRUCell(4, 3, rngs=r, **F64), reverse=True, return_carry=True),
            in_sequence,
        ),
        "Bidirectional": (two_ways, in_sequence),
    },
    "transforms": {
        "remat, jit": (linear, lambda m, b: nnx.jit(nnx.remat(lambda m, x: m(x)))(m, b["x"])),
        "vmap, scan": (
            lambda r: layers(r.split(2)),
            lambda m, b: nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                b["x"], m
            ),
        ),
        "vmap of examples": (
            linear,
            lambda m, b: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, b["x"]),
        ),
        "cond, switch": (
            linear,
            lambda m, b: nnx.cond(
                b["x"].sum() > 0,
                lambda m, x: nnx.switch(1, [lambda m, x: m(x), lambda m, x: m(2 * x)], m, x),
                lambda m, x: m(-x),
                m,
                b["x"],
            ),
        ),
        "fori_loop": (
            linear,
            lambda m, b: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (m, b["x"]))[1],
        ),
        "grad": (linear, lambda m, b: jax.grad(lambda x: jnp.sin(m(x)).sum())(b["x"])),
        "grad of a module": (
            linear,
            lambda m, b: (
                m(b["x"]),
                *squares(nnx.grad(lambda m, x: jnp.sin(m(x)).sum())(m, b["x"]), b),
            ),
        ),
        "custom_vjp": (linear, lambda m, b: doubled(m, b["x"])),
        "perturb": (Perturbed, on("x")),
        "bridge": (
            lambda r: nnx.bridge.ToNNX(nn.Dense(3, **F64), rngs=r).lazy_init(DATA["x"][:1]),
            on("x"),
        ),
    },
    "parts": {
        "LoRA": (lambda r: made(nnx.LoRA, 4, 2, 4, base_module=linear(r), **LORA)(r), on("x")),
    },
    "narrow": {
        "bfloat16": (made(nnx.Linear, 4, 3, dtype=jnp.bfloat16), on("x")),
        "float16": (made(nnx.Conv, 2, 3, (2, 2), dtype=np.float16), on("image")),
    },
    "functions": {
        "activations": (linear, lambda m, b: plain_loops.activated(nnx, m(b["x"]))),
        "pools": (
            made(nnx.Conv, 2, 3, (2, 2)),
            lambda m, b: [
                pool(m(b["image"]), (2, 2), strides=(2, 2), padding=padding)
                for pool in (nnx.avg_pool, nnx.max_pool, nnx.min_pool)
                for padding in ("VALID", "SAME")
            ],
        ),
    },
}


KEPT = (nnx.BatchStat, Average)
FIELDS = {"parts": {"wrt": nnx.LoRAParam}, "state": {"kept": KEPT}}
LOCAL = [
    ("random", "stepped"),
    ("state", "fused"),
    *(pytest.param(kind, "slices", marks=pytest.mark.slow) for kind in NNX),
]


class Beside(nnx.Module):
    """Modules beside each other: each has gradients of its own."""

    def __init__(self, cases):
        self.parts = nnx.Dict({name: make(nnx.Rngs(0)) for name, (make, _) in cases.items()})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `sow`
@pytest.mark.parametrize(("kind", "local"), [*((kind, "virtual") for kind in NNX), *LOCAL])
def test_modules_of_nnx_train_as_in_a_plain_loop(kind, local, float64):
    cases = {n: case for n, case in NNX[kind].items() if n != "RoPE" or hasattr(nnx, n)}

    def loss(model, batch):
        return sum(
            plain_loops.losses_of(call(model.parts[n], batch)) for n, (_, call) in cases.items()
        )

    model, fields = Beside(cases), FIELDS.get(kind, {})
    nnx.update(model, plain_loops.as_float64(nnx.state(model)))
    reference = plain_loops.of_nnx(model, loss, **fields)
    given = {"state" if name == "kept" else name: value for name, value in fields.items()}
    bound = 1e-2 if kind == "narrow" else 1e-12
    plain_loops.check(
        reference, *hetjax.nnx_loss(model, loss, **given), DATA, bound=bound, local=local
    )


def test_a_cache_that_a_call_changes_is_refused():
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((4, 3, 4))
    loss_fn, params = hetjax.nnx_loss(
        attention, lambda m, b: plain_loops.losses_of(m(b["x"][:, :1]))
    )
    with pytest.raises(ValueError, match="changes cache_index, cached_key"):
        jax.eval_shape(
            loss_fn, params, jax.tree.map(lambda leaf: leaf[:4], DATA), jax.random.key(0)
        )


def test_no_module_of_nnx_is_left_out():
    inner = pkgutil.iter_modules(nnx.nn.__path__, f"{nnx.nn.__name__}.")
    named = plain_loops.modules_of(nnx, *(importlib.import_module(each.name) for each in inner))
    found = {name for cases in NNX.values() for name in cases}
    assert named <= found | {"Module", "RNNCellBase", "Dict"}, "new: does it train, or why not?"
