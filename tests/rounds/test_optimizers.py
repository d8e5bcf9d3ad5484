"""Every optimiser of Optax, by name: a round updates as Optax's own loop does, or says why not."""

import ast
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

import hetjax
from hetjax.inputs import refusals as inputs

RATE = 0.05
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(24, 4)), "y": RNG.normal(size=(24, 3))}
PARAMS = {"w": RNG.normal(size=(4, 3)), "b": RNG.normal(size=3)}
ROUNDS = 7  # so that what is done every second round is between
FIELDS = {"workers": 3, "microbatch_size": 2, "budget": 12, "epochs": ROUNDS, "progress": False}

OTHER_FUNCTIONS = {  # that do not say what they return, and return no optimiser
    *("bias_correction", "matrix_inverse_pth_root", "schedule_free_eval_params"),
    *("sigmoid_binary_cross_entropy", "update_infinity_moment"),
    *("update_moment", "update_moment_per_elem_norm"),
}
PART, WHOLE = {"w": True, "b": False}, {"w": "one", "b": "two"}
TWO = {"one": optax.sgd(RATE), "two": optax.adam(RATE)}


def sam(**options):
    inner = optax.chain(contrib.normalize(), optax.sgd(0.1))
    return contrib.sam(optax.sgd(RATE), inner, sync_period=2, **options)


MADE = {  # those that need more than a learning rate
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2, accumulator_dtype=np.float64),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, key=0), optax.sgd(RATE)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(RATE)),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.sgd(RATE)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(RATE)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(RATE)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(RATE), lambda n: n > 1),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.sgd(RATE), lambda n: n > 1
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(RATE)),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "freeze": lambda: optax.chain(optax.sgd(RATE), optax.freeze(PART)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(
        learning_rate=optax.schedules.cosine_decay_schedule(RATE, 9)
    ),
    "lookahead": lambda: optax.lookahead(optax.adam(RATE), 2, 0.5),
    "masked": lambda: optax.masked(optax.sgd(RATE), PART),
    "mechanize": lambda: contrib.mechanize(optax.sgd(RATE)),
    "multi_transform": lambda: optax.multi_transform(TWO, WHOLE),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("sgd", optax.sgd(RATE))),
    "partition": lambda: optax.partition(TWO, WHOLE),
    "sam": sam,
    "scale": lambda: optax.scale(-RATE),
    "scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()}
    ),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -RATE / (1 + count)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(RATE), RATE),
    "selective_transform": lambda: optax.selective_transform(optax.sgd(RATE), freeze_mask=PART),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(RATE)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(RATE)),
    "stateless": lambda: optax.stateless(lambda grads, params: optax.tree.scale(-RATE, grads)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -RATE * g * p),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-RATE)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(RATE)),
}
JUDGED = {  # those whose parameters are not the point to judge: where that is
    "lookahead": lambda state, pair: optax.LookaheadParams.init_synced(pair.slow),
    "sam": lambda state, params: state.cache if state.steps_since_sync else params,
    **dict.fromkeys(
        ("schedule_free", "schedule_free_adamw", "schedule_free_sgd"),
        contrib.schedule_free_eval_params,
    ),
}
STARTS_KEPT = {  # whose state keeps parameters that are no point to judge: where they began
    *("cocob", "dog", "dowg", "madgrad", "mechanize", "prodigy"),
    *("scale_by_cocob", "scale_by_madgrad"),
}
TAKES_VALUE = {"momo", "momo_adam", "polyak_sgd", "reduce_on_plateau", "scale_by_polyak"}


def dpsgd():
    with pytest.warns(DeprecationWarning, match="use"):
        return contrib.dpsgd(RATE, 1.0, 1.0, 0)


REFUSED = {  # those that fit no round, and what is said
    "differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 1.0, 0),
        r"\(differentially_private_aggregate\) fails: .*batch dimension.*has one gradient",
    ),
    "dpsgd": (dpsgd, r"\(differentially_private_aggregate\)"),
    "hutchinson_estimator_diag_hessian": (
        contrib.hutchinson_estimator_diag_hessian,
        r"\(hutchinson_estimator_diag_hessian\) fails: ValueError: obj_fn must be provided",
    ),
    "lbfgs": (optax.lbfgs, r"\(scale_by_zoom_linesearch\) needs grad and value_fn, too\. L-BFGS"),
    "sam of its own gradients": (lambda: sam(opaque_mode=True), r"\(sam\) fails: .*grad_fn must"),
    "measure_with_ema": (  # a measure for optax.monitor
        lambda: optax.measure_with_ema(optax.tree.norm, 0.9),
        r"\(chain\) fails: ValueError: pytree structure error",
    ),
    "monitor": (
        lambda: optax.monitor({"norm": optax.tree.norm}),
        r"\(monitor\) returned a state with state/measurements/norm .*, where init made nothing",
    ),
    "scale_by_backtracking_linesearch": (
        lambda: optax.scale_by_backtracking_linesearch(9),
        r"\(scale_by_backtracking_linesearch\) needs grad and value_fn",
    ),
    "scale_by_zoom_linesearch": (
        lambda: optax.scale_by_zoom_linesearch(9),
        r"\(scale_by_zoom_linesearch\) needs grad and value_fn",
    ),
    "sophia": (lambda: contrib.sophia(RATE), "obj_fn must be provided"),
}


def factories():
    """By name, the functions of `optax` and `optax.contrib` that make an optimiser."""
    found = {"MultiSteps": optax.MultiSteps}
    for module in (optax, contrib):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            returned = inspect.signature(function).return_annotation
            says = returned is not inspect.Signature.empty
            if "GradientTransformation" in str(returned) or not (says or name in OTHER_FUNCTIONS):
                found[name] = function
    return found


FACTORIES = factories()


def made(name):
    """An optimiser; a part of one, which has no learning rate, with one behind it."""
    if name in MADE:
        return MADE[name]()
    parameters = inspect.signature(FACTORIES[name]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    assert needed in ([], ["learning_rate"]), (
        f"{name} is new: how is it made, or why is it refused?"
    )
    optimizer = FACTORIES[name](*([RATE] if needed else []))
    has_rate = "learning_rate" in inspect.signature(FACTORIES[name]).parameters
    return optimizer if has_rate else optax.chain(optimizer, optax.scale(-RATE))


def loss_fn(params, batch, rng):
    params = getattr(params, "fast", params)
    found = jnp.tanh(batch["x"] @ params["w"] + params.get("b", np.zeros(3))[None])
    return jnp.sum((found - batch["y"]) ** 2, axis=1)


def params_of(name):
    if name == "scale_by_muon":  # of matrices alone
        return {"w": PARAMS["w"]}
    return optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS


def plain(optimizer, params, *, takes_value=False):
    """Optax's own loop over the whole batch; of `LookaheadParams` by the fast ones' gradients."""

    @jax.jit
    def step(params, state):
        fast = getattr(params, "fast", params)
        value, grads = jax.value_and_grad(lambda p: jnp.mean(loss_fn(p, DATA, None)))(fast)
        extra = {"value": value} if takes_value else {}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    now = jax.tree.map(jnp.asarray, params)
    after = [(now, optimizer.init(now))]
    for _ in range(ROUNDS):
        after.append(step(*after[-1]))
    return after


def assert_close(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-13, atol=5e-13), found, wanted
    )


WALKED = [
    *((name, "virtual") for name in sorted(FACTORIES.keys() - REFUSED)),
    *((name, "stepped") for name in ("adam", "lookahead", "reduce_on_plateau", "sam")),
    *(
        pytest.param(name, "slices", marks=pytest.mark.slow)
        for name in sorted(FACTORIES.keys() - REFUSED)
    ),
]
SLICES = {"slices": {"data": 2}, "shard": hetjax.slices.fsdp(min_size=1)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Optax's own
@pytest.mark.parametrize(("name", "local"), WALKED)
@jax.numpy_rank_promotion("allow")  # as of scale_by_distance_over_gradients
def test_rounds_update_as_optax_does(name, local, float64):
    params = params_of(name)
    wanted, state = plain(made(name), params, takes_value=name in TAKES_VALUE)[-1]
    more = SLICES if local == "slices" else {"local": local}
    found = hetjax.fit(loss_fn, params, made(name), DATA, **more, **FIELDS)
    assert found.summary["rounds"] == ROUNDS
    assert_close(jax.tree.map(lambda x: x[0], found.state.params), wanted)
    assert_close(found.params, JUDGED.get(name, lambda state, params: params)(state, wanted))


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimiser_that_fits_no_round_says_why(name):
    optimizer, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^fit: .* this optimizer .*{message}") as refused:
        hetjax.fit(loss_fn, PARAMS, optimizer(), DATA, **FIELDS)
    assert "\n" not in str(refused.value)


def test_the_table_holds_no_name_that_optax_has_not():
    assert not (MADE.keys() | TAKES_VALUE) - FACTORIES.keys()
    assert REFUSED.keys() - FACTORIES.keys() == {"sam of its own gradients"}


def test_an_argument_goes_to_the_parts_of_a_chain_that_take_it(float64):
    plateau = contrib.reduce_on_plateau(patience=1)
    with pytest.raises(ValueError, match=r"\(reduce_on_plateau\) needs value, too.*\(\*part\)"):
        hetjax.fit(loss_fn, PARAMS, optax.chain(sam(), plateau), DATA, **FIELDS)
    hidden = optax.chain(optax.GradientTransformation(*sam()), plateau)
    found = hetjax.fit(loss_fn, PARAMS, hidden, DATA, **FIELDS)
    wanted = plain(hidden, PARAMS, takes_value=True)[-1][0]
    assert_close(jax.tree.map(lambda x: x[0], found.state.params), wanted)
    inner = optax.MultiSteps(optax.polyak_sgd(), 2, accumulator_dtype=np.float64)
    as_tuple = inner.gradient_transformation()  # which does not say that it takes more
    found = hetjax.fit(loss_fn, PARAMS, as_tuple, DATA, **FIELDS)
    assert_close(found.params, plain(as_tuple, PARAMS, takes_value=True)[-1][0])


def test_what_a_run_with_lookahead_hands_out_are_the_slow_parameters(tmp_path, float64):
    model = nnx.Linear(4, 3, param_dtype=np.float64, rngs=nnx.Rngs(0))
    of_fast, params = hetjax.nnx_loss(
        model, lambda m, b: jnp.sum((m(b["x"]) - b["y"]) ** 2, axis=1)
    )

    def loss(pair, batch, rng):
        return of_fast(pair.fast, batch, rng)

    seen, pair = [], optax.LookaheadParams.init_synced(params)
    optimizer = optax.lookahead(optax.sgd(RATE), 4, 0.5)  # after 7 rounds the pair differs
    fields = {**FIELDS, "eval_source": DATA, "workdir": tmp_path, "ema": 0.5}
    fields["callbacks"] = [lambda line: seen.append(line.params().fast)]
    found = hetjax.fit(loss, pair, optimizer, DATA, **fields)
    fast, slow = jax.tree.map(lambda x: x[0], tuple(found.state.params))
    assert not np.allclose(fast["kernel"], slow["kernel"])
    value = float(np.mean(of_fast(slow, DATA, jax.random.key(0))))
    assert found.summary["test_loss"] == pytest.approx(value, rel=1e-6)
    saved = hetjax.load(tmp_path)
    for given in (found.params, found.best_params, saved.params, saved.best_params):
        assert isinstance(given, optax.LookaheadParams)
        for params in given:
            assert_close(params, slow)
    assert_close(seen[-1], slow)
    assert_close(saved.ema_params, found.ema_params)
    assert_close(found.ema_params.fast, found.ema_params.slow)
    trained = hetjax.nnx_model(model, found.state._replace(params=pair._replace(slow=slow)).params)
    np.testing.assert_array_equal(trained.kernel[...], slow["kernel"])
    with pytest.raises(ValueError, match=r"\(lookahead\) fails.*LookaheadParams\.init_synced"):
        hetjax.fit(of_fast, slow, optax.lookahead(optax.sgd(RATE), 2, 0.5), DATA, **FIELDS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # Optax's own
@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - REFUSED - {"lookahead"}))
def test_whose_state_keeps_parameters_is_known(name, float64):
    params = jax.tree.map(jnp.asarray, params_of(name))
    kept = jax.tree.leaves(made(name).init(params))
    own = [leaf.shape for leaf in jax.tree.leaves(params)]
    keeps = any(leaf.shape in own and np.array_equal(leaf, params["w"]) for leaf in kept)
    assert keeps == (name in JUDGED.keys() | STARTS_KEPT)


def test_no_function_of_optax_for_the_point_to_judge_is_missed():
    names = {name for module in (optax, contrib) for name in vars(module) if "eval_params" in name}
    assert names == {"schedule_free_eval_params"}


def test_an_own_optimiser_is_looked_at_before_the_first_round():
    def growing(grads, state, params=None):
        return grads, {**state, "last": grads}

    def narrowing(grads, state, params=None):
        return jax.tree.map(lambda x: x[..., :1], grads), {"count": state["count"][:1]}

    def init(params):
        return {"count": jnp.zeros(2)}

    for function, words in (
        (growing, r"\(test_.*\) returned a state with state/last/b .*, where init made nothing"),
        (narrowing, r"\(test_.*\) returned a state with state/count float\d+\[1\]"),
        (lambda grads, state: (grads, state), "takes 2 positional arguments but 3 were given"),
        (lambda g, s, p, *, batch: (g, s), "needs batch, too. A round has one gradient"),
    ):
        optimizer = optax.GradientTransformation(init, function)
        with pytest.raises(ValueError, match=words):
            hetjax.fit(loss_fn, PARAMS, optimizer, DATA, **FIELDS)


RATED = [  # by default the other factories take no number
    name
    for name in sorted(FACTORIES.keys() - REFUSED - MADE.keys() - TAKES_VALUE)
    if "learning_rate" in inspect.signature(FACTORIES[name]).parameters
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", RATED)
@jax.numpy_rank_promotion("allow")
def test_injected_hyperparameters_run_or_are_named(name, float64):
    """What compares them runs in Optax alone where nothing is compiled."""
    try:
        optimizer = optax.inject_hyperparams(FACTORIES[name])(learning_rate=RATE)
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    except TypeError:
        pytest.skip("Optax cannot do it either")
    try:
        inputs.check_optimizer(optimizer, PARAMS)
    except ValueError as error:
        (names,) = re.findall(r"static_args=(\(.*\))\)", str(error))
        static = optax.inject_hyperparams(FACTORIES[name], static_args=ast.literal_eval(names))
        optimizer = static(learning_rate=RATE)
        assert name == "adafactor"
    if name in ("adafactor", "adam"):
        found = hetjax.fit(loss_fn, PARAMS, optimizer, DATA, local="virtual", **FIELDS)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))
