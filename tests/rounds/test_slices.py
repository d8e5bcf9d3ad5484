"""Workers of several devices: what they train, where it lies, and what they say."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hetjax
from tests.rounds import problems, slice_problems
from tests.rounds.slice_problems import fit

QUOTAS = {"fsdp": (5, 1, 3, 0), "tensor parallel": (5, 1, 3, 0), "both": (6, 3)}


@functools.cache
def of_one_device(**fields):
    return fit(workers=1, **fields)


def check_equal(found, expected, tolerance=1e-12):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("shape", QUOTAS)
def test_slices_train_as_one_device_does(shape, adaptive, float64):
    quotas = QUOTAS[shape]
    speeds = {"secs_per_microbatch": (0.1, 0.2, 0.4, 0.8)[: len(quotas)], "clock": "virtual"}
    more = {"cluster": speeds} if adaptive else {"proportions": quotas, "workers": len(quotas)}
    found = fit(shape=shape, **more)
    check_equal(found.params, of_one_device().params)
    assert len(found.history) == 50
    assert adaptive or found.history[0]["quotas"] == list(quotas)
    assert found.history[-1]["quotas"][0] > found.history[-1]["quotas"][-1]
    summary = found.summary
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    spec = found.state.params["blocks"][0]["up"].sharding.spec
    for of_optimizer in (found.state.opt_state[1][0].mu, found.state.opt_state[1][0].nu):
        assert of_optimizer["blocks"][0]["up"].sharding.spec == spec != P("worker")


def bytes_of(state):
    """Of a device, and of a worker."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return on_device, sum(leaf.nbytes // len(leaf) for leaf in leaves)


def test_a_device_has_its_part_of_parameters_and_state():
    state = fit(shape="fsdp", workers=2, max_rounds=2).state
    on_device, of_worker = bytes_of(state)
    assert on_device <= 0.55 * of_worker


def linear(params, batch, rng, *, frozen, values):
    hidden = jnp.tanh(batch["x"] @ params["first"]) @ frozen["between"]
    return problems.softmax_loss(params["last"], {**batch, "x": hidden}, rng) * values


def stateful(params, state, batch, rng):
    x = batch["x"] - state["mean"][None]
    losses = problems.softmax_loss(params["last"], {**batch, "x": x @ params["first"]}, rng)
    return losses, {"mean": 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)}


def noisy(params, batch, rng):
    noise = jax.vmap(lambda key: jax.random.normal(key, (problems.FEATURES,)))(rng)
    hidden = jnp.tanh((batch["x"] + noise) @ params["first"])
    return problems.softmax_loss(params["last"], {**batch, "x": hidden}, None)


def iterable(arrays):
    rows = [jax.tree.map(lambda leaf, k=k: leaf[k], arrays) for k in range(len(arrays["y"]))]
    return hetjax.stream(rows, examples_per_epoch=len(rows))


def embed(params, batch, rng):
    return batch["x"] @ params["first"], params["last"].T[batch["y"]]


def contrastive(params, embeddings, mask):
    scores = jnp.where(mask[None, :] > 0, embeddings[0] @ embeddings[1].T, -1e9)
    return mask @ (jax.nn.logsumexp(scores, -1) - jnp.diag(scores)) / jnp.sum(mask)


RNG = np.random.default_rng(3)
WIDE = 8
PARAMS = {
    "first": RNG.normal(size=(problems.FEATURES, WIDE)),
    "last": RNG.normal(size=(WIDE, problems.CLASSES)),
}
FROZEN = {"between": RNG.normal(size=(WIDE, WIDE))}
NAMED = {"frozen": FROZEN, "values": lambda progress: 1 - progress / 20}
SLOW_LAST = {"num_workers": 2, "secs_per_microbatch": (0.1, 0.3), "clock": "virtual"}
KINDS = {
    "plain": NAMED,
    "average": NAMED | {"ema": 0.9},
    "streamed": NAMED | {"data": {"feed": "streamed"}},
    "private": NAMED | {"data": {"sharing": "private"}},
    "gate": NAMED | {"gate": "first", "cluster": SLOW_LAST},
    "skip": NAMED | {"nonfinite": "skip"},
    "several dispatched": NAMED | {"dispatch_depth": 2},
    "local steps": NAMED | {"rule": hetjax.local_steps({"name": "adam", "learning_rate": 1e-3})},
    "clipped": NAMED | {"rule": hetjax.per_example_clip(1.0)},
    "loss over a round": {"loss_fn": hetjax.batch_loss(embed, contrastive)},
    "readers": NAMED | {"data": {"feed": "streamed", "readers": 2}},
    "updates skipped": NAMED | {"nonfinite": "skip_update"},
    "a key an example": {"loss_fn": noisy, "per_example_rng": True},
    "an iterable": NAMED | {"as_source": iterable},
    "state": {"loss_fn": stateful, "model_state": {"mean": np.ones(problems.FEATURES)}},
}


def by_width(path, shape):
    """Each axis of WIDE numbers over the model's axis."""
    return P(
        *(
            "model" if size == WIDE and shape.index(size) == k else None
            for k, size in enumerate(shape)
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_worker_may_do_is_as_on_one_device_each(kind, float64):
    def train(**more):
        fields = {"loss_fn": linear, "epochs": 3, "workers": 2, "quota": "equal", **KINDS[kind]}
        if "cluster" in fields:
            del fields["workers"]
        loss_fn, arrays = fields.pop("loss_fn"), problems.classification(203)
        source = fields.pop("as_source", lambda given: given)(arrays)
        fields |= {"microbatch_size": 4, "budget": 8, "progress": False}
        if kind not in ("loss over a round", "a key an example"):
            fields["eval_source"] = arrays
        return hetjax.fit(loss_fn, PARAMS, optax.sgd(0.05, 0.9), source, **fields, **more)

    alone = train()
    found = train(slices={"data": 2, "model": 2}, shard=by_width)
    check_equal(found.params, alone.params)
    check_equal(found.model_state, alone.model_state)
    check_equal(found.state.average, alone.state.average)
    check_equal(found.state.worker, alone.state.worker)
    for line, of_alone in zip(found.history, alone.history, strict=True):
        assert line["quotas"] == of_alone["quotas"]
        assert line["loss"] == pytest.approx(of_alone["loss"], rel=1e-6)
    assert found.state.params["first"].sharding.spec == P("worker", None, "model")


class OfNnx(nnx.Module):
    def __init__(self):
        init, kinds = nnx.initializers.lecun_normal(), {"rngs": nnx.Rngs(0)}
        cut = nnx.with_partitioning(init, (None, "model"))
        self.first = nnx.Linear(problems.FEATURES, WIDE, kernel_init=cut, **kinds)
        self.last = nnx.Linear(WIDE, problems.CLASSES, **kinds)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        cut = linen.with_partitioning(init, (None, "model"))
        x = jnp.tanh(linen.Dense(WIDE, name="first", kernel_init=cut)(x))
        return linen.Dense(problems.CLASSES, name="last")(x)


def cross_entropy(model, batch):
    x = jax.lax.with_sharding_constraint(batch["x"], P("data"))  # the loss sees the mesh
    return optax.softmax_cross_entropy_with_integer_labels(model(x), batch["y"])


def of_nnx():
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        return hetjax.nnx_loss(OfNnx(), cross_entropy)


def of_linen():
    module = OfLinen()
    variables = module.init(jax.random.key(0), jnp.ones((1, problems.FEATURES)))
    return hetjax.linen_loss(module, variables, cross_entropy)


@pytest.mark.parametrize("model", [of_nnx, of_linen])
def test_specs_of_a_model_are_found(model):
    loss_fn, params = model()
    fields = {"microbatch_size": 4, "epochs": 1, "workers": 2, "progress": False}
    slices, source = {"data": 2, "model": 2}, problems.classification(64, np.float32)
    result = hetjax.fit(loss_fn, params, optax.adam(1e-2), source, slices=slices, **fields)
    first, last = result.state.params["first"]["kernel"], result.state.params["last"]["kernel"]
    assert (first.sharding.spec, last.sharding.spec) == (P("worker", None, "model"), P("worker"))


def test_a_run_goes_on_to_the_bit(tmp_path):
    fields = {"shape": "both", "proportions": (5, 3), "workers": 2}
    whole = fit(**fields, max_rounds=8)
    fit(**fields, max_rounds=4, workdir=tmp_path)
    assert hetjax.load(tmp_path).params["out"].shape == (slice_problems.WIDTH, 32)
    resumed = fit(**fields, max_rounds=8, workdir=tmp_path)
    check_equal(resumed.state, whole.state, 0)


@pytest.mark.parametrize("other", [None, "fsdp", "tensor parallel"])
def test_another_shape_begins_with_the_state_of_a_result(other, float64):
    begun = fit(shape="both", workers=2, max_rounds=5)
    found = fit(shape=other, workers=4, max_rounds=5, init_state=begun)
    check_equal(found.params, fit(workers=1, max_rounds=5, init_state=begun).params)


def of_module(path, shape):
    return slice_problems.tensor_parallel(path, shape)


def test_a_function_is_named_by_its_import_path(float64):
    fields = {"slices": {"model": 2}, "workers": 2, "max_rounds": 5}
    found = fit(**fields, shard=f"{__name__}:of_module")
    assert found.state.params["out"].sharding.spec == P("worker", None, "model")
    check_equal(found.params, fit(**fields, shard=of_module).params)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_arrays_lie_as_they_are_given_on_a_mesh_of_any_types(types):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (types,) * 2)
    rows, columns = (jax.NamedSharding(mesh, spec) for spec in (P("model"), P(None, "model")))
    given = {"first": jax.device_put(PARAMS["first"], columns)}
    given |= {"last": jax.device_put(PARAMS["last"], rows)}
    source, fields = problems.classification(80), {"microbatch_size": 4, "budget": 4, "epochs": 1}
    fields |= {"slices": {"data": 2, "model": 2}, "workers": 2, "progress": False}
    fields |= {"frozen": {"between": jax.device_put(FROZEN["between"], rows)}}
    values = lambda progress: 1.0  # noqa: E731
    found = hetjax.fit(linear, given, optax.sgd(0.1), source, values=values, **fields)
    assert found.state.params["first"].sharding.spec == P("worker", None, "model")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"fit outside of jax\.set_mesh"):
        hetjax.fit(linear, given, optax.sgd(0.1), source, values=values, **fields)


TOLD = {
    "fsdp": ({"data": 2}, hetjax.slices.fsdp(min_size=1), r"2,\d+ of 5,152 parameters$"),
    "too small": ({"data": 2}, "fsdp", "5,152 of 5,152 parameters; nothing is cut over data"),
    "nothing": ({"model": 2}, None, "parameters; nothing is cut over model"),
    "no spec": ({"data": 2, "model": 2}, lambda path, shape: None, "over data and model"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_line_says_how_much_a_device_has(name, capfd):
    axes, shard, text = TOLD[name]
    fit(slices=axes, shard=shard, workers=2, max_rounds=1)
    (line,) = re.findall(r"slices: a device has (.*)", capfd.readouterr().err)
    assert re.search(text, line)


def test_a_small_evaluation_lies_over_the_data_axis_too():
    seen = []

    def metrics(params, batch):
        jax.debug.inspect_array_sharding(batch["tokens"], callback=seen.append)
        return {"loss": slice_problems.loss(params, batch, None)}

    fields = {"eval_source": slice_problems.data(7), "metrics_fn": metrics, "max_rounds": 1}
    found = fit(shape="both", workers=2, **fields)
    assert {sharding.spec[0] for sharding in seen} == {"data"}
    given = jax.tree.map(jnp.asarray, (found.params, slice_problems.data(7)))
    losses = slice_problems.loss(*given, None)
    assert found.summary["test_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_a_number_that_is_not_finite_is_traced_in_a_loss_that_sees_the_mesh():
    def loss(params, batch, rng):
        x = jax.lax.with_sharding_constraint(batch["x"] @ params["first"], P("data"))
        return jnp.sqrt(x[:, 0] - 1e6) + 0 * params["last"].sum()

    fields = {"microbatch_size": 4, "budget": 4, "epochs": 1, "workers": 2, "progress": False}
    with pytest.raises(hetjax.NonFiniteError, match="sqrt"):
        hetjax.fit(
            loss,
            PARAMS,
            optax.sgd(0.1),
            problems.classification(80),
            slices={"data": 2, "model": 2},
            shard=by_width,
            **fields,
        )


def test_what_is_recorded_of_fsdp_are_its_options(tmp_path):
    fields = {"workers": 2, "slices": {"data": 2}, "max_rounds": 2, "workdir": tmp_path}
    fit(**fields, shard="fsdp")
    assert fit(**fields, shard=hetjax.slices.fsdp()).config["slices"]["shard"] == "fsdp"
    with pytest.raises(ValueError, match=r"slices\.shard: 'fsdp' there"):
        fit(**fields | {"max_rounds": 3}, shard=hetjax.slices.fsdp(min_size=1))
