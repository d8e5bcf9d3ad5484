"""Plain Flax and Optax over the microbatches of a run: what unequal workers must agree with."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hetjax
from tests import oracles
from tests.rounds.stateful_problem import distance

SIZE, QUOTAS, ROUNDS = 4, [3, 2, 1], 2
BATCH = SIZE * sum(QUOTAS)
FIELDS = {
    "microbatch_size": SIZE,
    "budget": sum(QUOTAS),
    "quota": {"policy": "static", "proportions": QUOTAS},
    "workers": 3,
    "epochs": 1,
    "progress": False,
    "loss_over": "microbatch",  # what examples see of each other is not looked for
}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
F64 = {"param_dtype": jnp.float64}


def as_float64(tree):
    return jax.tree.map(
        lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def examples(seed=0):
    drawn = np.random.default_rng(seed)
    num = ROUNDS * BATCH
    return {
        "x": drawn.normal(size=(num, 3, 4)),
        "image": drawn.normal(size=(num, 4, 4, 2)),
        "ids": drawn.integers(5, size=(num, 3)).astype(np.int32),
        "lengths": drawn.integers(1, 4, size=num).astype(np.int32),
        "y": drawn.normal(size=num),
        "label": drawn.integers(3, size=num).astype(np.int32),
    }


def weighted_sum(returned):
    """The sum of the losses that a user's function returned, and their weight."""
    losses, weights = returned if isinstance(returned, tuple) else (returned, None)
    weights = jnp.ones_like(losses) if weights is None else weights
    return (losses * weights).sum(), weights.sum()


def asked(loss, key, num_streams, rngs_of):
    """What the loss names, of the microbatch's key."""
    values = {
        "rngs": lambda: rngs_of(jax.random.fold_in(key, num_streams)),
        "rng": lambda: jax.random.fold_in(key, num_streams + 1),
    }
    names = inspect.signature(loss).parameters
    return {name: value() for name, value in values.items() if name in names}


def of_nnx(model, loss, wrt=nnx.Param, kept=nnx.BatchStat):
    """`(gradient of a microbatch, parameters, state)`, as NNX's own loop has them."""
    graph, params, state, rest = nnx.split(model, wrt, kept, ...)
    keys = nnx.to_flat_state(nnx.state(model, nnx.RngKey))
    streams = sorted({str(key.tag) for _, key in keys})

    def total(params, state, batch, key):
        built = nnx.merge(graph, params, state, rest, copy=True)
        of_streams = {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}
        nnx.reseed(built, policy="match_shape", **of_streams)
        found, weight = weighted_sum(loss(built, batch, **asked(loss, key, len(streams), nnx.Rngs)))
        return found, (weight, nnx.state(built, kept))

    return jax.jit(jax.grad(total, has_aux=True)), params, state


def of_linen(module, variables, loss, streams=("dropout",)):
    """The same of Linen."""
    variables = nn.unbox(variables)
    rest = {name: part for name, part in variables.items() if name not in ("params", "batch_stats")}

    def total(params, state, batch, key):
        after, given = dict(state), {"params": params, **rest}

        def rngs_of(key):
            return {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}

        def model(*args, mutable=(), **kwargs):
            kwargs = {"rngs": rngs_of(key), **kwargs}
            changing = [*after, *mutable]
            out, new = module.apply({**given, **after}, *args, mutable=changing, **kwargs)
            after.update({name: new[name] for name in after})
            return (out, {name: new[name] for name in mutable}) if mutable else out

        found, weight = weighted_sum(loss(model, batch, **asked(loss, key, len(streams), rngs_of)))
        return found, (weight, after)

    state = {"batch_stats": variables["batch_stats"]} if "batch_stats" in variables else {}
    return jax.jit(jax.grad(total, has_aux=True)), variables["params"], state


def of_function(loss, params):
    """The same of a plain loss."""

    def total(params, state, batch, key):
        found, weight = weighted_sum(loss(params, batch, key))
        return found, (weight, state)

    return jax.jit(jax.grad(total, has_aux=True)), params, {}


def rounds_of(of_microbatch, params, state, data, optimizer=OPTIMIZER):
    """Sums of gradients over each round's microbatches, divided once; state is averaged."""
    key = jax.random.fold_in(jax.random.key(0), 0)
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for ids in oracles.shuffled_rounds(ROUNDS * BATCH, [BATCH] * ROUNDS, 0):
        found = []
        for own in ids.reshape(-1, SIZE):
            batch = jax.tree.map(lambda leaf, own=own: leaf[own], data)
            of_one = of_microbatch(params, state, batch, jax.random.fold_in(key, own[0]))
            found.append(jax.device_get(of_one))
        weight = sum(weight for _, (weight, _) in found)
        grads = jax.tree.map(lambda *each, w=weight: sum(each) / w, *[each for each, _ in found])
        state = jax.tree.map(lambda *each: sum(each) / len(each), *[each for _, (_, each) in found])
        updates, opt_state = update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + u, *jax.device_get((params, updates)))
    return params, state


def plain(tree):
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def check(reference, loss_fn, params, data, optimizer=OPTIMIZER, bound=1e-12, **fields):
    """A run of three unequal workers against the plain loop; the parameters must have moved."""
    given = {"local": "virtual", **FIELDS, **fields}
    if given["local"] == "slices":
        given |= {"local": "stepped", "slices": {"data": 2}}
        given |= {"shard": hetjax.slices.fsdp(min_size=1)}
    result = hetjax.fit(loss_fn, params, optimizer, data, **given)
    assert [line["quotas"] for line in result.history] == [QUOTAS] * ROUNDS
    wanted = rounds_of(*reference, data, optimizer)
    leaves = jax.tree.leaves_with_path(plain(wanted[0]))
    for (path, leaf), found, begun in zip(
        leaves, *map(jax.tree.leaves, (result.params, params)), strict=True
    ):
        assert np.abs(leaf - begun).max() > 1e-6 or "bias" in str(path), f"{path} does not move"
        assert np.abs(leaf - found).max() < bound * max(1, np.abs(leaf).max()), path
    if jax.tree.leaves(wanted[1]):
        assert distance(plain(wanted[1]), result.model_state) < bound
        assert distance(result.model_state, plain(reference[2])) > 1e-6
    return result


# --- Tables over all modules ---


def losses_of(out):
    """A loss of one example from whatever a module returns."""
    leaves = [jnp.sin(leaf).reshape(len(leaf), -1).sum(-1) for leaf in jax.tree.leaves(out)]
    return sum(leaves)


def normal(key, shape, dtype=float):
    return jax.random.normal(key, shape, dtype)


_SHAPES = {"glu", "logsumexp", "one_hot"}  # of functions that return another one
_ACTIVATIONS = sorted(
    name
    for name, function in vars(nn.activation).items()
    if "jax" in getattr(function, "__module__", "") and name not in _SHAPES and hasattr(nnx, name)
)


def activated(module, x):
    return [getattr(module, name)(x) for name in _ACTIVATIONS]


def modules_of(*namespaces):
    """The names of all modules there are in them."""
    every = [pair for namespace in namespaces for pair in vars(namespace).items()]
    kinds = nn.Module, nnx.Module
    return {name for name, kind in every if isinstance(kind, type) and issubclass(kind, kinds)}
