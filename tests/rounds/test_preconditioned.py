"""Orders that balance gradients over √v̂ of the optimiser, against a slow reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import ordering
from hetjax.ordering import herding
from hetjax.rounds import second_moments
from tests.rounds import problems
from tests.rounds.order_comparison import compare_with_reference, recorded
from tests.rounds.order_reference import (
    BUDGET,
    EPOCHS,
    SIZE,
    WORKERS,
    Adam,
    Balancer,
    example_gradients,
    reference_run,
)


def made(method, block_pairs):
    options = {"block_pairs": block_pairs} if block_pairs else {}
    return ordering.ORDERINGS[method](precondition=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "block_pairs", "local", "sharing"),
    [
        ("d_grab", 2, "stepped", "shared"),
        ("d_grab", 2, "fused", "private"),
        ("d_grab", 1, "virtual", "shared"),
        ("d_grab_exact", 0, "virtual", "private"),
        ("d_grab_exact", 0, "fused", "shared"),
        ("pair_balance", 1, "virtual", "private"),
        ("pair_balance_exact", 0, "stepped", "shared"),
    ],
)
def test_signs_orders_and_parameters_equal_the_reference(
    method, block_pairs, local, sharing, tmp_path, float64
):
    adam = Adam(problems.initial_weights().size)
    compare_with_reference(tmp_path, method, local, sharing, block_pairs=block_pairs, adam=adam)


def test_plain_and_preconditioned_orders_differ(tmp_path, float64):
    data, weights = problems.classification(103), problems.initial_weights()
    totals = problems.round_totals(103, EPOCHS, SIZE, BUDGET)
    trace = problems.write_trace(tmp_path / "metrics.jsonl", totals, WORKERS)
    options = {"method": "d_grab", "sharing": "shared", "block_pairs": 2}

    class Plain(Adam):
        def scale(self):
            return np.ones_like(self.square)

    commits, _ = reference_run(data, weights, trace, **options, adam=Adam(weights.size))
    plain, _ = reference_run(data, weights, trace, **options, adam=Plain(weights.size))
    assert commits[0] == plain[0]  # before the first update v̂ is zero
    assert any(signs != others for (_, signs), (_, others) in zip(commits, plain, strict=True))


@functools.cache
def of_replicas(local):
    """What a run with gossip places and ends at, of a local form."""
    calls = []
    result = problems.fit(
        problems.classification(61),
        problems.initial_weights(),
        optimizer=optax.adam(0.1),
        local=local,
        epochs=3,
        reducer="d_psgd",
        quota={"policy": "equal"},
        ordering=recorded(made("pair_balance", 1), calls),
    )
    nu = np.asarray(optax.tree_utils.tree_get(result.state.opt_state, "nu"))
    assert np.abs(nu[0] - nu[1]).max() > 1e-6  # or nothing is shown
    return calls, result.params


@pytest.mark.slow
@pytest.mark.parametrize("local", ["stepped", "fused"])
def test_each_replica_scales_by_its_own_optimiser(local, float64):
    """Under gossip; the array form is the oracle."""
    (calls, params), (right_calls, right_params) = of_replicas(local), of_replicas("virtual")
    for (examples, signs), (others, right) in zip(calls, right_calls, strict=True):
        np.testing.assert_array_equal(examples, others)
        np.testing.assert_array_equal(signs, right)
    np.testing.assert_allclose(params, right_params, rtol=1e-9)


def test_a_step_of_ones_own_balances_by_the_scale_of_its_state(float64):
    data, weights = problems.classification(64), problems.initial_weights()
    counts = np.array([3, 0, 2, 1])
    ids = np.random.default_rng(3).permutation(64)[:48].reshape(4, 3, 4)
    mesh, optimizer = hetjax.make_worker_mesh(4), optax.adam(0.1)
    train_step = hetjax.make_train_step(
        problems.softmax_loss,
        optimizer,
        mesh,
        nominal_examples=48,
        ordering=made("d_grab", 1),
        microbatch_size=4,
        max_microbatches=3,
    )
    state = hetjax.make_train_state(
        weights, optimizer, num_workers=4, mesh=mesh, observer=train_step.observer
    )
    step = jax.jit(train_step)
    microbatches = hetjax.Microbatch(
        ids.astype(np.int32),
        np.ones(ids.shape, np.float32),
        {k: v[ids] for k, v in data.items()},
    )
    balancer, adam = Balancer("d_grab", 4, weights.size, 1), Adam(weights.size)
    for _ in range(3):
        gradients = [
            [example_gradients(data, weights, ids[w, m]) for m in range(counts[w])]
            for w in range(4)
        ]
        right = balancer.round([[adam.scale() * own for own in m] for m in gradients])
        mean = np.concatenate([own for m in gradients for own in m]).mean(axis=0)
        weights = weights - 0.1 * adam.update(mean).reshape(weights.shape)
        state, _, example_signs = step(state, microbatches, counts, jax.random.key(0))
        for worker, signs in enumerate(right):
            found = example_signs[worker, : counts[worker]].reshape(-1)
            np.testing.assert_array_equal(found, signs)
    np.testing.assert_allclose(state.params[0], weights, rtol=1e-9)


@pytest.mark.slow
def test_a_run_that_is_cut_goes_on_bit_by_bit(tmp_path):
    def fit(workdir, **options):
        return problems.fit(
            problems.classification(61, np.float32),
            problems.initial_weights(np.float32),
            optimizer=optax.adam(0.1),
            local="virtual",
            epochs=4,
            ordering={"method": "d_grab", "precondition": True},
            checkpoint={"every_rounds": 1},
            workdir=tmp_path / workdir,
            **options,
        )

    def stop(line):
        return hetjax.STOP if line.round == 5 else None

    whole = fit("whole")
    fit("cut", callbacks=[stop])
    np.testing.assert_array_equal(fit("cut").params, whole.params)


@pytest.mark.parametrize("precondition", [True, False])
def test_the_bound_of_a_run_is_told_in_both_metrics(precondition, float64):
    """At a learning rate of 0 the gradients stay, and so does v̂ up to the rounds' means."""
    result = problems.fit(
        problems.classification(480),
        problems.initial_weights(),
        optimizer=optax.adam(0.0),
        local="virtual",
        epochs=6,
        ordering={
            "method": "d_grab",
            "block_pairs": 2,
            "precondition": precondition,
            "herding_every": 1,
        },
        quota={"max_microbatches": 2},
    )
    told = [line["herding"] for line in result.history if "herding" in line][-1]
    name = "preconditioned_inf_norm" if precondition else "inf_norm"
    assert told[name] < told[f"random_{name}"] / 2
    for kind in ("inf_norm", "two_norm"):
        assert told[f"preconditioned_{kind}"] != told[kind]
    assert result.summary["ordering"]["microbatch_secs"] > 0


def test_the_bound_over_the_second_moments_equals_the_reference(float64):
    data, weights, states = problems.classification(104), problems.initial_weights(), []
    method = ordering.d_grab()

    def keep(state, examples, signs):
        states.append(method.place(state, examples, signs))
        return states[-1]

    result = problems.fit(
        data,
        weights,
        optimizer=optax.adam(0.0),
        local="virtual",
        epochs=1,
        ordering={"method": method._replace(place=keep), "herding_every": -1},
        quota={"policy": "equal"},
    )
    gradients, adam = example_gradients(data, weights, np.arange(104)), Adam(weights.size)
    planned = np.random.default_rng((0, 0)).permutation(104)
    for ids in np.array_split(planned, [32, 64, 96]):  # 4 workers, 8 microbatches of 4
        adam.update(gradients[ids].mean(axis=0))
    rounds = np.array_split(states[-1].order, [32, 64, 96])
    centred = adam.scale() * (gradients - gradients.mean(axis=0))
    prefixes = np.cumsum([centred[ids].sum(axis=0) for ids in rounds], axis=0)
    (told,) = [line["herding"] for line in result.history if "herding" in line]
    np.testing.assert_allclose(
        [told["preconditioned_inf_norm"], told["preconditioned_two_norm"]],
        [np.abs(prefixes).max(), np.linalg.norm(prefixes, axis=1).max()],
        rtol=1e-8,
    )
    of_orders = herding.parallel_herding_bound(
        gradients[None], states[-1].order[None], scale=adam.scale()
    )
    assert of_orders[0] >= told["preconditioned_inf_norm"] * (1 - 1e-8)


# What the optimiser keeps

OF_KIND = {"a": "one", "b": "two"}


def two_decays():
    return optax.partition(
        {"one": optax.adam(0.1, b2=0.9), "two": optax.rmsprop(0.1, decay=0.7)}, dict(OF_KIND)
    )


OPTIMIZERS = {
    "adam": (lambda: optax.adam(0.1), (0.999, 0.999), True),
    "adamw": (lambda: optax.adamw(0.1, b2=0.95, weight_decay=0.1), (0.95, 0.95), True),
    "nadam": (lambda: optax.nadam(0.1, b2=0.98), (0.98, 0.98), True),
    "lamb": (lambda: optax.lamb(0.1), (0.999, 0.999), True),
    "rmsprop": (lambda: optax.rmsprop(0.1, decay=0.8), (0.8, 0.8), False),
    "corrected": (lambda: optax.scale_by_rms(0.8, bias_correction=True), (0.8, 0.8), True),
    "chain": (
        lambda: optax.chain(optax.clip_by_global_norm(1e9), optax.adam(0.1, b2=0.9)),
        (0.9, 0.9),
        True,
    ),
    "injected": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1, b2=0.9),
        (0.9, 0.9),
        True,
    ),
    "if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), (0.999, 0.999), True),
    "two_decays": (two_decays, (0.9, 0.7), (True, False)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_scale_is_that_of_the_squares_so_far(name, float64):
    make, decays, corrected = OPTIMIZERS[name]
    corrected = corrected if isinstance(corrected, tuple) else (corrected,) * 2
    optimizer, rng = make(), np.random.default_rng(0)
    params = {"a": np.ones((3, 2)), "b": np.ones(5)}
    read = second_moments.reader(optimizer, params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    moments = {"a": np.zeros((3, 2)), "b": np.zeros(5)}
    for count in range(4):
        for (key, moment), decay, is_mean in zip(moments.items(), decays, corrected, strict=True):
            v = moment / (1 - decay**count) if count and is_mean else moment
            right = np.where(v > 0, 1 / (np.sqrt(np.maximum(v, 1e-99)) + 1e-8), 1)
            np.testing.assert_allclose(read(state).scale()[key], right, rtol=1e-12)
        gradients = {k: rng.normal(size=x.shape) for k, x in params.items()}
        gradients["b"][0] = 0.0  # nobody has seen this one
        _, state = update(gradients, state, params)
        for key, decay in zip(moments, decays, strict=True):
            moments[key] = decay * moments[key] + (1 - decay) * gradients[key] ** 2


def test_amsgrad_divides_by_its_largest_moment(float64):
    optimizer, params = optax.amsgrad(0.1), {"w": np.ones(4)}
    state, read = optimizer.init(params), second_moments.reader(optimizer, params)
    for gradient in (np.arange(4.0), np.full(4, 0.1), np.full(4, 0.1)):
        _, state = optimizer.update({"w": gradient}, state, params)
    (largest,) = [x.nu_max["w"] for x in state if hasattr(x, "nu_max")]
    np.testing.assert_allclose(read(state).scale()["w"], 1 / (np.sqrt(largest) + 1e-8), rtol=1e-12)


def test_the_decay_of_narrow_parameters_is_not_rounded():
    params = {"w": jnp.ones(7, jnp.bfloat16)}
    moments = second_moments.reader(optax.adam(0.1), params)(optax.adam(0.1).init(params))
    assert moments.decays == (float(np.float32(0.999)),)
    with jax.numpy_dtype_promotion("strict"):
        assert moments.scale()["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "a run without an optimiser has no second moments"),
        (optax.sgd(0.1, momentum=0.9), "keeps no second moments: its state has no 'nu'"),
        (optax.adagrad(0.1), "keeps no second moments"),
        (optax.lion(0.1), "keeps no second moments"),
        (optax.adamax(0.1), "'nu' of the optimiser's ScaleByAdamState is not the running mean"),
        (optax.yogi(0.1), "is not the running mean of squared gradients"),
        (optax.rmsprop(0.1, centered=True), "ScaleByRStdDevState is not the running mean"),
        (optax.novograd(0.1), "no second moment .*of the parameter"),
        (
            optax.partition({"one": optax.adam(0.1), "two": optax.sgd(0.1)}, dict(OF_KIND)),
            r"no second moment \('nu'\) of the parameter \['b'\]",
        ),
        (
            optax.chain(optax.scale_by_adam(), optax.scale_by_rms()),
            r"2 second moments \('nu'\) of the parameter \['a'\]",
        ),
    ],
)
def test_an_optimiser_without_them_is_refused(optimizer, message):
    params = {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)}
    with pytest.raises(ValueError, match=rf"ordering.precondition: .*{message}.*optax.adam"):
        second_moments.reader(optimizer, params)


def test_a_run_refuses_before_anything_is_computed(tmp_path):
    rounds = []
    with pytest.raises(ValueError, match=r"ordering.precondition: .*no second moments.*adamw"):
        problems.fit(
            problems.classification(64, np.float32),
            problems.initial_weights(np.float32),
            optimizer=optax.sgd(0.1),
            ordering={"method": "d_grab", "precondition": True},
            callbacks=[rounds.append],
        )
    assert not rounds
