"""Arrays that training does not change are arguments of programs: `frozen`, and `wrt=`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hetjax
from hetjax import bilevel, digests
from hetjax.local import gradients, rules
from hetjax.losses import named
from tests.rounds import problems

ROUNDS = 20
WIDE = 6
FIELDS = {
    "microbatch_size": 4,
    "budget": 8,
    "quota": {"policy": "static", "proportions": (3, 1)},
    "cluster": {"num_workers": 2},
    "progress": False,
}
DATA = problems.classification(64)
FROZEN = {"w": np.random.default_rng(1).normal(size=(problems.FEATURES, problems.FEATURES))}


class Lora(nnx.Module):
    def __init__(self):
        kinds = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        rank = {"lora_rank": 2, "lora_param_dtype": jnp.float64}
        self.first = nnx.LoRALinear(problems.FEATURES, WIDE, **rank, **kinds)
        self.scale = nnx.Variable(jnp.full((), 1.5, jnp.float64))
        self.flag = nnx.Variable(True)
        self.last = nnx.Linear(WIDE, problems.CLASSES, **kinds)

    def __call__(self, x):
        assert self.flag.get_value()  # what is no array stays what it is
        return self.last(jnp.tanh(self.first(x)) * self.scale[...])


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDE, name="base", param_dtype=jnp.float64)(x)
        return linen.Dense(problems.CLASSES, name="head", param_dtype=jnp.float64)(jnp.tanh(x))


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def teach(params, batch, rng, *, frozen):
    return problems.softmax_loss(params, {**batch, "x": batch["x"] @ frozen["w"]}, rng)


def closed(params, batch, rng):
    return teach(params, batch, rng, frozen=FROZEN)


def plain():
    return (teach, {"frozen": FROZEN}), closed, problems.initial_weights()


def of_nnx():
    model = Lora()
    loss_fn, params = hetjax.nnx_loss(model, cross_entropy, wrt=nnx.LoRAParam)
    return (loss_fn, {}), lambda params, batch, rng: loss_fn(params, batch, rng), params


def of_linen():
    module = Dense()
    variables = module.init(jax.random.key(0), DATA["x"][:1])
    given = {"wrt": lambda path, _: "head" in path}
    loss_fn, params = hetjax.linen_loss(module, variables, cross_entropy, **given)
    return (loss_fn, {}), lambda params, batch, rng: loss_fn(params, batch, rng), params


def of_one():
    """Of one example, with an order that balances gradients."""

    def one(params, example, rng, *, frozen):
        return teach(params, jax.tree.map(lambda x: x[None], example), rng, frozen=frozen)[0]

    given = {"frozen": FROZEN, "ordering": "pair_balance"}
    closed = hetjax.per_example(lambda *given: one(*given, frozen=FROZEN))
    return (hetjax.per_example(one), given), closed, problems.initial_weights()


def of_batch():
    """Of the examples of a round."""

    def embed(params, batch, rng, *, frozen=FROZEN):
        return problems.embed(params, {**batch, "x": batch["x"] @ frozen["w"]}, rng)

    def closed(params, batch, rng):
        return embed(params, batch, rng)

    asking, closed = (hetjax.batch_loss(each, problems.contrast) for each in (embed, closed))
    return (asking, {"frozen": FROZEN}), closed, problems.initial_weights()


KINDS = {f.__name__: f for f in (plain, of_nnx, of_linen, of_one, of_batch)}


def fit(loss_fn, params, **fields):
    given = {**FIELDS, "epochs": ROUNDS // 2, **fields}
    return hetjax.fit(loss_fn, params, optax.sgd(0.1, momentum=0.9), DATA, **given)


def run(loss_fn, params, **fields):
    fields = {"quota": FIELDS["quota"], "cluster": FIELDS["cluster"], **fields}
    return problems.run(DATA, params, loss_fn=loss_fn, **fields)


def check_equal(*params):
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    jax.tree.map(close, *map(jax.device_get, params))


@pytest.mark.parametrize(
    ("kind", "local"),
    [
        *((kind, "virtual") for kind in KINDS),
        *((kind, "stepped") for kind in ("plain", "of_linen", "of_batch")),
        *((kind, "fused") for kind in ("plain", "of_nnx", "of_one")),
    ],
)
def test_frozen_arguments_train_as_constants_do(kind, local, float64):
    (loss_fn, given), constant, params = KINDS[kind]()
    ordering = {"ordering": given.get("ordering", "random_reshuffling")}
    found = fit(loss_fn, params, local=local, **given)
    expected = fit(constant, params, local=local, **ordering)
    assert found.history[0]["quotas"] == [6, 2]
    check_equal(found.params, expected.params)


@pytest.mark.parametrize("kind", ["plain", "of_nnx", "of_linen"])
def test_nothing_frozen_is_a_constant_of_a_program(kind, float64):
    (loss_fn, given), _, params = KINDS[kind]()
    loss_fn = named.giving(loss_fn, 3)
    frozen = named.frozen_of(loss_fn, given.get("frozen", ()))
    shared = hetjax.types.Shared(params, named=hetjax.types.Named(frozen))
    steps = rules.with_observer(gradients.gradient_sums(loss_fn))
    batch, ids = jax.tree.map(lambda x: x[:4], DATA), np.arange(4, dtype=np.int32)
    microbatch = hetjax.types.Microbatch(ids, np.ones(4, np.float32), batch)
    carried = steps.begin(shared, (), ())
    program = jax.make_jaxpr(steps.add)(shared, carried, microbatch, jax.random.key(0))
    assert max((np.size(each) for each in digests.constants(program)), default=0) <= 4


def test_on_cpus_it_lies_once():
    weights = problems.initial_weights(np.float32)
    with run(teach, weights, frozen=FROZEN) as made:
        state, _ = made.round(made.init())
        (leaf,) = jax.tree.leaves(made.setup.frozen)
        places = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == 2
        assert len(places) == 1
        assert made.named(state.train).frozen["w"].unsafe_buffer_pointer() in places


@pytest.mark.parametrize("kind", ["of_nnx", "of_linen"])
def test_evaluation_and_a_result_have_the_frozen_part(kind, float64, tmp_path):
    (loss_fn, _), _, params = KINDS[kind]()
    if kind == "of_nnx":
        model, given = Lora(), {"wrt": nnx.LoRAParam}
        metrics = hetjax.nnx_metrics(model, lambda m, b: {"loss": cross_entropy(m, b)}, **given)
    else:
        module, given = Dense(), {"wrt": lambda path, _: "head" in path}
        variables = module.init(jax.random.key(0), DATA["x"][:1])
        metrics = hetjax.linen_metrics(
            module, variables, lambda m, b: {"loss": cross_entropy(m, b)}, **given
        )
    result = fit(loss_fn, params, eval_source=DATA, metrics_fn=metrics, workdir=tmp_path, ema=0.5)
    saved = hetjax.load(tmp_path).params
    if kind == "of_nnx":
        trained = hetjax.nnx_model(model, saved, **given)
    else:
        found = hetjax.linen_variables(variables, saved, **given)
        trained = lambda x: module.apply(found, x)  # noqa: E731
    expected = float(cross_entropy(trained, DATA).mean())
    assert result.summary["test_loss"] == pytest.approx(expected, abs=1e-8)
    found = hetjax.evaluate(result.params, DATA, metrics)["loss"]
    assert found == pytest.approx(expected, abs=1e-12)
    by_loss = fit(loss_fn, params, eval_source=DATA).summary["test_loss"]
    assert by_loss == pytest.approx(expected, abs=1e-8)


def test_metrics_are_given_what_the_run_is(float64):
    def metrics_fn(params, batch, *, frozen):
        return {"loss": teach(params, batch, None, frozen=frozen)}

    given = {"frozen": FROZEN, "eval_source": DATA, "metrics_fn": metrics_fn}
    result = fit(teach, problems.initial_weights(), **given)
    found = hetjax.evaluate(result.params, DATA, metrics_fn, frozen=FROZEN)["loss"]
    assert result.summary["test_loss"] == pytest.approx(found, abs=1e-8)


def test_an_adapters_frozen_part_goes_beside_what_fit_is_given(float64):
    def distilled(model, batch, *, frozen, values):
        away = model(batch["x"]) - batch["x"] @ frozen["w"][:, : problems.CLASSES]
        return cross_entropy(model, batch) + values * jnp.square(away).mean(1)

    loss_fn, params = hetjax.nnx_loss(Lora(), distilled, wrt=nnx.LoRAParam)
    found = fit(loss_fn, params, frozen=FROZEN, values=lambda progress: 0.5 + 0 * progress)

    def constant(model, batch):
        return distilled(model, batch, frozen=FROZEN, values=0.5)

    expected = fit(*hetjax.nnx_loss(Lora(), constant, wrt=nnx.LoRAParam))
    check_equal(found.params, expected.params)


def other_nnx():
    """A teacher of the student's kind, as a model and as a loss of its own."""
    given = {"wrt": nnx.LoRAParam}
    teacher = Lora()
    teacher.first.kernel[...] = 2 * teacher.first.kernel[...]
    scores, params = hetjax.nnx_loss(teacher, lambda model, batch: model(batch["x"])[:, 0], **given)

    def of_model(batch):
        return hetjax.nnx_model(teacher, params, **given)(batch["x"])[:, 0]

    def make(loss):
        return hetjax.nnx_loss(Lora(), loss, **given)

    return make, (lambda batch: scores(params, batch, jax.random.key(0)), of_model)


def other_linen():
    module, given = Dense(), {"wrt": lambda path, _: "head" in path}
    ours, theirs = (module.init(jax.random.key(i), DATA["x"][:1]) for i in range(2))
    function = lambda model, batch: model(batch["x"])[:, 0]  # noqa: E731
    scores, params = hetjax.linen_loss(module, theirs, function, **given)

    def of_model(batch):
        found = hetjax.linen_variables(theirs, params, **given)
        return module.apply(found, batch["x"])[:, 0]

    def make(loss):
        return hetjax.linen_loss(module, ours, loss, **given)

    return make, (lambda batch: scores(params, batch, jax.random.key(0)), of_model)


@pytest.mark.parametrize("of", [other_nnx, other_linen])
def test_another_model_in_a_loss_keeps_its_own_frozen_part(of, float64):
    make, teachers = of()
    taught = np.asarray(teachers[0](DATA))
    data = {**DATA, "taught": taught}

    def loss_of(teacher):
        return lambda model, batch: (model(batch["x"])[:, 0] - teacher(batch)) ** 2

    found = []
    for teacher in (lambda batch: batch["taught"], *teachers):
        loss_fn, params = make(loss_of(teacher))
        fields = {**FIELDS, "epochs": 2}
        found.append(hetjax.fit(loss_fn, params, optax.sgd(0.1), data, **fields).params)
    for other in found[1:]:
        check_equal(found[0], other)


def test_levels_of_a_bilevel_problem_are_given_it(float64):
    def upper(x, y, batch, *, frozen):
        return (batch["x"] @ frozen["w"] @ y - batch["t"]) ** 2

    def lower(x, y, batch, *, frozen):
        return upper(x, y, batch, frozen=frozen) + jnp.exp(x) * jnp.sum(y**2)

    def solve(*losses, **given):
        estimator = bilevel.implicit(bilevel.descent(optax.sgd(0.01)), 5)
        fields = {"outer_steps": 4, "microbatch_size": 4, "workers": 2, "progress": False}
        data = {"x": DATA["x"], "t": DATA["x"].sum(1)}
        fields |= {f"{name}_source": data for name in ("upper", "lower", "eval")}
        begun = np.float64(1.0), np.zeros(problems.FEATURES), estimator, optax.sgd(0.5)
        return hetjax.fit_bilevel(bilevel.Bilevel(*losses), *begun, **given, **fields)

    found = solve(upper, lower, frozen=FROZEN)
    expected = solve(*(lambda x, y, b, f=f: f(x, y, b, frozen=FROZEN) for f in (upper, lower)))
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-12)
    assert found.summary["best_test_loss"] == pytest.approx(expected.summary["best_test_loss"])


def test_a_step_of_ones_own_loop_takes_it(float64):
    ids, counts, found = np.arange(64).reshape(2, 8, 4), np.array([6, 2], np.int32), []
    for loss_fn, given in ((teach, {"frozen": FROZEN}), (closed, {})):
        weights, sgd = problems.initial_weights(), optax.sgd(0.1)
        step, *begun = problems.own_step(ids, DATA, weights, sgd, loss_fn=loss_fn, **given)
        given = {"frozen": step.frozen} if given else {}
        new, *_ = jax.jit(step.function)(*begun, counts, jax.random.key(0), **given)
        found.append(np.asarray(new.params))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


def test_a_run_knows_its_frozen_arrays(float64, tmp_path):
    weights, kept = problems.initial_weights(), {"workdir": tmp_path}
    fit(teach, weights, frozen=FROZEN, **kept)
    other = {"w": FROZEN["w"] + 1}
    with pytest.raises(ValueError, match="the frozen arrays have other values"):
        fit(teach, weights, frozen=other, epochs=ROUNDS, **kept)
    fit(teach, weights, frozen=FROZEN, epochs=ROUNDS, **kept)


def test_much_that_is_closed_over_is_told(capsys, float64):
    large = np.ones((9, 1_000_000))

    def loss_fn(params, batch, rng):
        return problems.softmax_loss(params, batch, rng) + 0 * jnp.asarray(large)[0, 0]

    fit(loss_fn, problems.initial_weights(), epochs=1)
    assert "loss_fn closes over 72 MB of arrays" in capsys.readouterr().err
    fit(closed, problems.initial_weights(), epochs=1)
    assert "closes over" not in capsys.readouterr().err
