"""Every module of Flax NNX and Linen: unequal workers train it as a plain loop does, or say why."""

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


def losses_of(out):
    """A loss of one example from whatever a module returns."""
    leaves = [jnp.sin(leaf).reshape(len(leaf), -1).sum(-1) for leaf in jax.tree.leaves(out)]
    return sum(leaves)


# --- NNX: a name, how it is made, and how it is called ---


def on(field):
    return lambda module, batch: module(batch[field])


def of_mask(module, batch):
    x = batch["x"]
    return module(x, mask=x > x.min((1, 2), keepdims=True))


def in_sequence(module, batch):
    return module(batch["x"], seq_lengths=batch["lengths"])


def normal(key, shape, dtype=float):
    return jax.random.normal(key, shape, dtype)


def random_carry(module, batch):
    shape = (len(batch["x"]), 4)
    carry = module.cell.initialize_carry(shape, module.rngs, carry_init=normal)
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


SHAPES = {"glu", "logsumexp", "one_hot"}  # of functions that return another one
ACTIVATIONS = sorted(
    name
    for name, function in vars(nn.activation).items()
    if "jax" in getattr(function, "__module__", "") and name not in SHAPES and hasattr(nnx, name)
)


def activated(module, x):
    return [getattr(module, name)(x) for name in ACTIVATIONS]


class Average(nnx.Variable):
    """A kind of one's own."""


class Averaged(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.mean = linear(rngs), Average(jnp.zeros((1, 1, 4)))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1), keepdims=True)
        return self.linear(x - self.mean[...])


TRAINING = {"deterministic": False, "decode": False}


NNX = {
    "linear": {
        "Linear": (lambda r: nnx.Linear(4, 3, rngs=r, **F64), on("x")),
        "LinearGeneral": (
            lambda r: nnx.LinearGeneral((3, 4), (2, 2), axis=(1, 2), rngs=r, **F64),
            on("x"),
        ),
        "Einsum": (lambda r: nnx.Einsum("btf,fg->btg", (4, 2), (2,), rngs=r, **F64), on("x")),
        "Embed": (lambda r: nnx.Embed(5, 3, rngs=r, **F64), on("ids")),
        "LoRA": (lambda r: nnx.LoRA(4, 2, 3, b_initializer=normal, rngs=r, **F64), on("x")),
        "LoRALinear": (
            lambda r: nnx.LoRALinear(
                4, 3, lora_rank=2, b_initializer=normal, lora_param_dtype=float, rngs=r, **F64
            ),
            on("x"),
        ),
        "PReLU": (lambda r: nnx.PReLU(param_dtype=jnp.float64), on("x")),
        "Conv": (lambda r: nnx.Conv(2, 3, (3, 3), strides=2, rngs=r, **F64), on("image")),
        "ConvTranspose": (lambda r: nnx.ConvTranspose(2, 3, (2, 2), rngs=r, **F64), on("image")),
    },
    "norms": {
        "LayerNorm": (lambda r: nnx.LayerNorm(4, rngs=r, **F64), of_mask),
        "RMSNorm": (lambda r: nnx.RMSNorm(4, rngs=r, **F64), of_mask),
        "GroupNorm": (lambda r: nnx.GroupNorm(4, 2, rngs=r, **F64), of_mask),
        "InstanceNorm": (lambda r: nnx.InstanceNorm(4, rngs=r, **F64), of_mask),
        "WeightNorm": (
            lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r, **F64), rngs=r, **F64),
            copied,
        ),
    },
    "state": {
        "BatchNorm": (lambda r: nnx.BatchNorm(4, momentum=0.9, rngs=r, **F64), of_mask),
        "SpectralNorm": (
            lambda r: nnx.SpectralNorm(linear(r), rngs=r, **F64),
            copied,
        ),
        "a kind of one's own": (Averaged, on("x")),
    },
    "random": {
        "Dropout": (
            lambda r: nnx.Sequential(nnx.Linear(4, 3, rngs=r, **F64), nnx.Dropout(0.5, rngs=r)),
            on("x"),
        ),
        "MultiHeadAttention": (
            lambda r: nnx.MultiHeadAttention(2, 4, dropout_rate=0.3, **TRAINING, rngs=r, **F64),
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
        "LoRA": (
            lambda r: nnx.LoRA(4, 2, 4, base_module=linear(r), b_initializer=normal, rngs=r, **F64),
            on("x"),
        ),
    },
    "narrow": {
        "bfloat16": (lambda r: nnx.Linear(4, 3, dtype=jnp.bfloat16, rngs=r, **F64), on("x")),
        "float16": (lambda r: nnx.Conv(2, 3, (2, 2), dtype=np.float16, rngs=r, **F64), on("image")),
    },
    "functions": {
        "activations": (linear, lambda m, b: activated(nnx, m(b["x"]))),
        "pools": (
            lambda r: nnx.Conv(2, 3, (2, 2), rngs=r, **F64),
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
LOCAL = [("random", "stepped"), ("state", "fused")]


class Beside(nnx.Module):
    """Modules beside each other: each has gradients of its own."""

    def __init__(self, cases):
        self.parts = nnx.Dict({name: make(nnx.Rngs(0)) for name, (make, _) in cases.items()})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `sow`
@pytest.mark.parametrize(("kind", "local"), [*((kind, "virtual") for kind in NNX), *LOCAL])
def test_modules_of_nnx_train_as_in_a_plain_loop(kind, local, float64):
    cases = {n: case for n, case in NNX[kind].items() if n != "RoPE" or hasattr(nnx, n)}

    def loss(model, batch):
        return sum(losses_of(call(model.parts[n], batch)) for n, (_, call) in cases.items())

    model, fields = Beside(cases), FIELDS.get(kind, {})
    nnx.update(model, plain_loops.as_float64(nnx.state(model)))
    reference = plain_loops.of_nnx(model, loss, **fields)
    given = {"state" if name == "kept" else name: value for name, value in fields.items()}
    bound = 1e-2 if kind == "narrow" else 1e-12
    plain_loops.check(
        reference, *hetjax.nnx_loss(model, loss, **given), DATA, bound=bound, local=local
    )


# --- Linen: a name, and how it is made and called in a compact module ---


def linen_cell(made, *args, **more):
    return lambda b: nn.RNN(made(*args, **F64), **more)(b["x"], seq_lengths=b["lengths"])


LINEN = {
    "linear": {
        "Dense": lambda b: nn.Dense(3, **F64)(b["x"]),
        "DenseGeneral": lambda b: nn.DenseGeneral((2, 2), axis=(1, 2), **F64)(b["x"]),
        "Einsum": lambda b: nn.Einsum((4, 2), "btf,fg->btg", **F64)(b["x"]),
        "Embed": lambda b: nn.Embed(5, 3, **F64)(b["ids"]),
        "PReLU": lambda b: nn.PReLU(param_dtype=float)(b["x"]),
        "Conv": lambda b: nn.Conv(3, (3, 3), strides=2, **F64)(b["image"]),
        "ConvLocal": lambda b: nn.ConvLocal(3, (2, 2), **F64)(b["image"]),
        "ConvTranspose": lambda b: nn.ConvTranspose(3, (2, 2), **F64)(b["image"]),
        "Sequential": lambda b: nn.Sequential([nn.Dense(3, **F64), nn.tanh])(b["x"]),
    },
    "norms": {
        "LayerNorm": lambda b: nn.LayerNorm(**F64)(b["x"]),
        "RMSNorm": lambda b: nn.RMSNorm(**F64)(b["x"]),
        "GroupNorm": lambda b: nn.GroupNorm(2, **F64)(b["x"]),
        "InstanceNorm": lambda b: nn.InstanceNorm(**F64)(b["x"]),
        "WeightNorm": lambda b: nn.WeightNorm(nn.Dense(3, **F64), **F64)(b["x"]),
    },
    "state": {
        "BatchNorm": lambda b: nn.BatchNorm(False, momentum=0.9, **F64)(b["x"]),
        "SpectralNorm": lambda b: nn.SpectralNorm(nn.Dense(3, **F64))(b["x"], update_stats=True),
    },
    "random": {
        "Dropout": lambda b: nn.Dropout(0.5, deterministic=False)(nn.Dense(3, **F64)(b["x"])),
        "MultiHeadAttention": lambda b: nn.MultiHeadAttention(2, dropout_rate=0.3, **F64)(
            b["x"], deterministic=False
        ),
        "MultiHeadDotProductAttention": lambda b: nn.MultiHeadDotProductAttention(2, **F64)(
            b["x"], b["x"], mask=nn.make_causal_mask(b["ids"])
        ),
        "SelfAttention": lambda b: nn.SelfAttention(2, **F64)(b["x"]),
    },
    "recurrent": {
        "LSTMCell": linen_cell(nn.LSTMCell, 3),
        "OptimizedLSTMCell": linen_cell(nn.OptimizedLSTMCell, 3, reverse=True),
        "SimpleCell": linen_cell(nn.SimpleCell, 3),
        "GRUCell": linen_cell(nn.GRUCell, 3, return_carry=True),
        "MGUCell": linen_cell(nn.MGUCell, 3),
        "ConvLSTMCell": lambda b: nn.RNN(nn.ConvLSTMCell(2, (2, 2), **F64))(
            jnp.stack([b["image"]] * 2, 1)
        ),
        "RNN": lambda b: nn.RNN(nn.GRUCell(3, **F64), variable_broadcast="params")(b["x"]),
        "Bidirectional": lambda b: nn.Bidirectional(
            nn.RNN(nn.GRUCell(3, **F64)), nn.RNN(nn.SimpleCell(3, **F64))
        )(b["x"]),
    },
    "transforms": {
        "remat, jit": lambda b: nn.jit(nn.remat(nn.Dense))(3, **F64)(b["x"]),
        "scan": lambda b: nn.scan(
            Step,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )()(b["x"], None)[0],
        "remat_scan": lambda b: nn.remat_scan(nn.Dense, lengths=(2, 1))(4, **F64)(b["x"]),
        "vmap": lambda b: nn.vmap(
            nn.Dense, variable_axes={"params": None}, split_rngs={"params": False}
        )(3, **F64)(b["x"]),
        "map_variables": lambda b: nn.map_variables(
            nn.Dense, "params", lambda p: jax.tree.map(jnp.tanh, p), init=True
        )(3, **F64)(b["x"]),
        "BatchApply": lambda b: nn.BatchApply(nn.Dense(3, **F64))(b["x"]),
        "with_partitioning": lambda b: nn.Dense(
            3, kernel_init=nn.with_partitioning(normal, (None, "model")), **F64
        )(b["x"]),
    },
    "functions": {
        "activations": lambda b: activated(nn, nn.Dense(4, **F64)(b["x"])),
        "pools": lambda b: [
            pool(nn.Conv(3, (2, 2), **F64)(b["image"]), (2, 2))
            for pool in (nn.avg_pool, nn.max_pool)
        ],
    },
}


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(4, **F64)(x)), None


class Together(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, batch):
        return [call(batch) for call in LINEN[self.kind].values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `SelfAttention`
@pytest.mark.parametrize(("kind", "local"), [*((kind, "virtual") for kind in LINEN), *LOCAL])
def test_modules_of_linen_train_as_in_a_plain_loop(kind, local, float64):
    module = Together(kind)
    batch = jax.tree.map(lambda leaf: leaf[:1], DATA)
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    variables = plain_loops.as_float64(module.init(keys, batch))

    def loss(model, batch):
        return losses_of(model(batch))

    reference = plain_loops.of_linen(module, variables, loss)
    plain_loops.check(reference, *hetjax.linen_loss(module, variables, loss), DATA, local=local)


# --- What is refused, and that nothing is left out ---


def decoding_nnx():
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((4, 3, 4))
    return hetjax.nnx_loss(attention, lambda m, b: losses_of(m(b["x"][:, :1])))


def with_variables(module, *args):
    variables = module.init(jax.random.key(0), *args)
    return hetjax.linen_loss(module, variables, lambda m, b: losses_of(m(b["x"][:, :1])))


class ByEinsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", normal, (4, 3), np.float32)
        return nn.Fp8Einsum()("btf,fg->btg", x, kernel)


def fp8(name):
    dense = nn.Dense(3, dot_general_cls=getattr(nn, name))
    x = DATA["x"][:1].astype(np.float32)
    return lambda: with_variables(ByEinsum() if name == "Fp8Einsum" else dense, x)


FP8 = ["Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum"]
REFUSED = {
    "decode of nnx": (decoding_nnx, "changes cache_index"),
    "decode of linen": (
        lambda: with_variables(nn.MultiHeadAttention(2, decode=True), DATA["x"][:4]),
        "changes cache",
    ),
    **{name: (fp8(name), "Fp8") for name in [*FP8, "NANOOFp8DotGeneralOp"]},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_fits_no_round_says_why(name):
    made, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        hetjax.fit(*made(), plain_loops.OPTIMIZER, DATA, **plain_loops.FIELDS)


BASES = {"Module", "RNNCellBase", "Dict"}  # of the others; all are in a `Dict` here


@pytest.mark.parametrize(("namespace", "table"), [(nnx, NNX), (nn, LINEN)])
def test_no_module_is_left_out(namespace, table):
    walked = [namespace]
    if namespace is nnx:
        inner = pkgutil.iter_modules(nnx.nn.__path__, f"{nnx.nn.__name__}.")
        walked += [importlib.import_module(each.name) for each in inner]
    names = {
        name
        for module in walked
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, namespace.Module)
    }
    found = {name for cases in table.values() for name in cases} | REFUSED.keys() | BASES
    assert names <= found, "new: does it train, or why is it refused?"
