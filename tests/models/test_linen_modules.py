"""Every module of Flax Linen: unequal workers train it as a plain loop does, or say why."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from tests.models import plain_loops
from tests.models.plain_loops import F64

DATA = plain_loops.examples()
LOCAL = [("random", "fused"), ("state", "stepped")]


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
            3, kernel_init=nn.with_partitioning(plain_loops.normal, (None, "model")), **F64
        )(b["x"]),
    },
    "functions": {
        "activations": lambda b: plain_loops.activated(nn, nn.Dense(4, **F64)(b["x"])),
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


SLICES = [pytest.param(kind, "slices", marks=pytest.mark.slow) for kind in LINEN]


class Together(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, batch):
        return [call(batch) for call in LINEN[self.kind].values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `SelfAttention`
@pytest.mark.parametrize(
    ("kind", "local"), [*((kind, "virtual") for kind in LINEN), *LOCAL, *SLICES]
)
def test_modules_of_linen_train_as_in_a_plain_loop(kind, local, float64):
    module = Together(kind)
    batch = jax.tree.map(lambda leaf: leaf[:1], DATA)
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    variables = plain_loops.as_float64(module.init(keys, batch))

    def loss(model, batch):
        return plain_loops.losses_of(model(batch))

    reference = plain_loops.of_linen(module, variables, loss)
    plain_loops.check(reference, *hetjax.linen_loss(module, variables, loss), DATA, local=local)


# --- What is refused, and that nothing is left out ---


def with_variables(module, *args):
    variables = module.init(jax.random.key(0), *args)
    return hetjax.linen_loss(
        module, variables, lambda m, b: plain_loops.losses_of(m(b["x"][:, :1]))
    )


class ByEinsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", plain_loops.normal, (4, 3), np.float32)
        return nn.Fp8Einsum()("btf,fg->btg", x, kernel)


def fp8(name):
    dense = nn.Dense(3, dot_general_cls=getattr(nn, name))
    x = DATA["x"][:1].astype(np.float32)
    return lambda: with_variables(ByEinsum() if name == "Fp8Einsum" else dense, x)


FP8 = ["Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum"]
REFUSED = {
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


def test_no_module_of_linen_is_left_out():
    found = {name for cases in LINEN.values() for name in cases} | REFUSED.keys()
    named = plain_loops.modules_of(nn)
    assert named <= found | {"Module", "RNNCellBase"}, "new: does it train, or why not?"
