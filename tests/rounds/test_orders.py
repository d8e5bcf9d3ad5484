"""Training with balanced orders against a slow reference: orders, signs and parameters."""

import json

import jax
import numpy as np
import optax
import pytest

import hetjax
from experiments.orders import herding
from hetjax import ordering, types
from hetjax.checkpoints import leaves
from hetjax.config import experiment
from hetjax.data import sources
from hetjax.data import stream as stream_lib
from hetjax.local import stepped
from hetjax.rounds import build
from tests.own_parts import gate
from tests.rounds import problems
from tests.rounds.order_comparison import compare_with_reference, made, recorded
from tests.rounds.order_reference import WORKERS, example_gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "block_pairs", "local", "sharing"),
    [
        ("d_grab", 2, "stepped", "shared"),
        ("d_grab", 2, "fused", "private"),
        ("d_grab", 2, "virtual", "private"),
        ("d_grab", 16, "virtual", "shared"),
        ("d_grab_exact", 1, "stepped", "private"),
        ("d_grab_exact", 1, "fused", "shared"),
        ("d_grab_exact", 1, "virtual", "shared"),
        ("pair_balance", 1, "virtual", "private"),
        ("pair_balance_exact", 1, "stepped", "shared"),
        ("grab", 1, "virtual", "private"),
        ("grab", 1, "stepped", "shared"),
    ],
)
def test_orders_and_parameters_equal_the_reference(
    method, block_pairs, local, sharing, tmp_path, float64
):
    compare_with_reference(tmp_path, method, local, sharing, block_pairs=block_pairs)


def orders_of(calls, num_examples):
    """The realised orders of whole passes, shared data."""
    examples = np.concatenate([examples for examples, _ in calls])
    return examples[: len(examples) // num_examples * num_examples].reshape(-1, num_examples)


def test_gates_absence_and_skipped_microbatches_leave_permutations():
    """Every order is a permutation at every epoch's end, and the sums stay finite."""
    calls = []
    order = recorded(ordering.d_grab(block_pairs=1), calls)
    data = problems.classification(61, np.float32)
    data["x"][17] = np.nan
    result = problems.fit(
        data,
        problems.initial_weights(np.float32),
        epochs=4,
        nonfinite="skip",
        gate=gate.after(3),
        ordering={"method": order},
        cluster={
            "num_workers": 4,
            "changes": [
                {"round": 2, "worker": 1, "present": False},
                {"round": 9, "worker": 1, "present": True},
            ],
        },
    )
    orders = orders_of(calls, 61)
    assert len(orders) == 4
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(61))
    assert not np.array_equal(orders[0], orders[1])
    assert np.isfinite(result.state.memory).all()
    assert np.abs(result.state.memory).max() > 0
    assert result.summary["examples_missing"] == result.summary["examples_duplicated"] == 0


def bounds(num_examples, **fields):
    """Of the order that a run at a learning rate of 0 leaves."""
    with hetjax.Run(
        problems.softmax_loss,
        problems.initial_weights(),
        optax.sgd(0.0),
        problems.classification(num_examples),
        **{"workers": WORKERS, "microbatch_size": 4, "budget": 8, "local": "virtual", **fields},
    ) as run:
        state = run.init()
        while not run.done(state):
            state, report = run.round(state)
        return herding.Bounds(run)(state, np.array(report.read().quotas))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["d_grab", "d_grab_exact", "pair_balance"])
def test_balancing_lowers_the_herding_bound(method, float64):
    """At a learning rate of 0 the gradients stay, and the bound halves until its floor."""
    order = made(method, block_pairs=2)
    found = bounds(480, epochs=6, ordering=order, quota={"max_microbatches": 2})
    assert found["inf_norm"] < found["random_inf_norm"] / 2
    assert found["two_norm"] < found["random_two_norm"] / 2


@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_the_herding_bound_equals_the_reference(sharing, float64):
    data, weights = problems.classification(104), problems.initial_weights()
    states = []
    method = ordering.d_grab()

    def keep(state, examples, signs):
        states.append(method.place(state, examples, signs))
        return states[-1]

    order = method._replace(place=keep)
    found = bounds(104, epochs=1, ordering=order, data={"sharing": sharing}, quota="equal")
    gradients = example_gradients(data, weights, np.arange(104))
    if sharing == "shared":  # 4 workers, 8 microbatches of 4
        in_rounds = np.array_split(states[-1].order, [32, 64, 96])
    else:
        stream = stream_lib.PrivateStream(
            104, WORKERS, microbatch_size=4, ordering=ordering.random_reshuffling(), seed=0
        )
        last = states[-WORKERS:]  # the closing commits of the four shards, each of 26
        orders_ = [shard[state.order] for shard, state in zip(stream.shards, last, strict=True)]
        cut = [np.array_split(order, [8, 16, 24]) for order in orders_]
        in_rounds = [np.concatenate(parts) for parts in zip(*cut, strict=True)]
    mean = gradients.mean(axis=0)
    prefixes = np.cumsum([(gradients[ids] - mean).sum(axis=0) for ids in in_rounds], axis=0)
    np.testing.assert_allclose(found["inf_norm"], np.abs(prefixes).max(), rtol=1e-8)
    np.testing.assert_allclose(found["two_norm"], np.linalg.norm(prefixes, axis=1).max(), rtol=1e-8)
    assert found["random_inf_norm"] > 0


# A feed knows nothing of orders.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed", "method"), [("resident", "grab_random_sign"), ("streamed", "frozen")]
)
def test_other_orders_run_with_weights_and_streamed_data(method, feed):
    def loss_fn(weights, batch, rng):
        kept = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
        losses = problems.softmax_loss(
            weights, {**batch, "x": batch["x"] * kept.astype(batch["x"].dtype)}, rng
        )
        return losses, 1.0 + batch["y"].astype(losses.dtype)

    calls = []
    problems.fit(
        problems.classification(61, np.float32),
        problems.initial_weights(np.float32),
        loss_fn=loss_fn,
        local="virtual",
        epochs=4,
        data={"feed": feed},
        ordering={"method": recorded(made(method, freeze_after=2), calls)},
    )
    orders = orders_of(calls, 61)
    np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(61), (4, 1)))
    assert np.array_equal(orders[2], orders[3]) == (method == "frozen")
    assert not np.array_equal(orders[1], orders[2])


@pytest.mark.parametrize("local", ["stepped", "virtual"])
def test_a_round_in_which_nobody_finishes(local, tmp_path):
    quotas = [[1, 1, 1, 1]] * 4
    done = [[0, 0, 0, 0], *quotas[1:]]
    lines = [
        json.dumps({"quotas": q, "microbatches_done": d}) for q, d in zip(quotas, done, strict=True)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = problems.fit(
        problems.classification(64, np.float32),
        problems.initial_weights(np.float32),
        local=local,
        epochs=1,
        budget=4,
        replay=str(tmp_path / "metrics.jsonl"),
        ordering={"method": "d_grab"},
    )
    assert result.summary["examples_processed"] == 48


@pytest.mark.slow
def test_a_pass_that_is_cut_goes_on_to_the_same_orders(float64):
    """All that an order needs lies in the training state and in the stream."""
    data, weights = problems.classification(61), problems.initial_weights()
    config = experiment.validate(
        {
            "local": "virtual",
            "microbatch_size": 4,
            "budget": 4,
            "cluster": {"num_workers": 4},
            "ordering": {"method": "d_grab", "block_pairs": 1},
        }
    )
    source = sources.as_source(data)

    def begin():
        setup = build.build(
            problems.softmax_loss,
            weights,
            optax.sgd(0.1),
            source,
            config=config,
            per_example_rng=False,
        )
        return (
            setup,
            setup.begun,
            setup.programs.main.begin(setup.begun.params, setup.begun.kept),
            setup.stream.init(),
        )

    def go_on(setup, state, carried, at, num_rounds):
        stream = setup.stream
        epoch = stream.epoch(at)
        for _ in range(num_rounds):
            if stream.epoch(at) > epoch:
                epoch = stream.epoch(at)
                memory, carried = setup.new_pass(state.memory, carried, np.ones(4, bool))
                state = state._replace(memory=memory)
            quotas = np.array([2, 1, 1, 0])
            quotas = quotas if stream.total(at, 4) == 4 else np.array([1, 0, 0, 0])
            plan = stream.plan(at, quotas)
            contributed, work = setup.programs.main.local.run(
                stepped.LocalPlan(0, plan, plan.quotas),
                types.Shared(state.params),
                carried,
                [setup.rng] * 4,
            )
            done = setup.programs.main.sync.call(state, contributed, setup.shares, ())
            state, carried, flips = done.state, done.carried, np.asarray(done.flips)
            signs = [s * f for s, f in zip(work.example_signs, flips, strict=True)]
            at = stream.commit(at, plan, work.microbatches_done, signs)
        return state, carried, at

    setup, *begun = begin()
    state, carried, at = go_on(setup, *begun, 6)
    saved = jax.device_get((state, carried)), leaves.flatten(at)  # both are copies
    state, _, at = go_on(setup, state, carried, at, 7)
    again, _, _, fresh = begin()
    middle = leaves.unflatten(fresh, saved[1])
    restored, _, at_again = go_on(again, *jax.device_put(saved[0]), middle, 7)
    jax.tree.map(np.testing.assert_array_equal, at_again, at)
    np.testing.assert_array_equal(restored.params, state.params)
    assert setup.stream.epoch(at) == again.stream.epoch(at_again) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_block_reshuffling_turns_what_was_realised_round(sharing, tmp_path):
    """With a gate, unequal speeds and a worker that is away; cut, a run goes on."""
    method = ordering.block_reshuffling(block_size=3)

    def fit(workdir, calls, **options):
        def place(state, examples, signs):
            realised, seed = [*state.realised[: state.num_placed], *examples], state.seed
            state = method.place(state, examples, signs)
            calls.append((seed, state.pass_index, state.num_placed, realised, state.order.copy()))
            return state

        return problems.fit(
            problems.classification(61, np.float32),
            problems.initial_weights(np.float32),
            local="virtual",
            epochs=4,
            data={"sharing": sharing},
            gate=gate.after(3),
            ordering=method._replace(place=place),
            workdir=tmp_path / workdir,
            checkpoint={"every_rounds": 1},
            cluster={
                "num_workers": 4,
                "secs_per_microbatch": (1, 2, 3, 4),
                "changes": [
                    {"round": 2, "worker": 1, "present": False},
                    {"round": 6, "worker": 1, "present": True},
                ],
            },
            **options,
        )

    calls, parts = [], []
    whole = fit("whole", calls)
    fit("cut", parts, max_rounds=8)
    np.testing.assert_array_equal(fit("cut", parts).params, whole.params)
    assert len(parts) == len(calls)
    assert whole.summary["examples_missing"] == whole.summary["examples_duplicated"] == 0
    ends = 0
    for call, other in zip(calls, parts, strict=True):
        seed, pass_index, num_placed, realised, order = call
        assert call[:4] == other[:4]
        np.testing.assert_array_equal(order, other[4])
        if num_placed:
            continue
        ends += 1
        if pass_index % 2:
            np.testing.assert_array_equal(order, realised[::-1])
            continue
        first = np.random.default_rng((*seed, 0)).permutation(len(order))
        blocks = [first[start : start + 3] for start in range(0, len(first), 3)]
        sequence = np.random.default_rng((*seed, pass_index)).permutation(len(blocks))
        np.testing.assert_array_equal(order, np.concatenate([blocks[i] for i in sequence]))
    assert ends >= 4


def test_on_one_device_the_running_sum_of_all_workers_is_kept_once():
    fields = {"cluster": {"num_workers": 4}, "microbatch_size": 4, "budget": 8, "quota": "equal"}
    given = problems.softmax_loss, problems.initial_weights(np.float32), optax.sgd(0.1)
    rows = {}
    for local in ("virtual", "stepped"):
        data = problems.classification(96, np.float32)
        with hetjax.Run(*given, data, local=local, ordering="d_grab", **fields) as run:
            state = run.init()
            for _ in range(4):
                state, _ = run.round(state)
            rows[local] = np.asarray(state.train.memory)
    assert rows["virtual"].shape == (1, *rows["stepped"].shape[1:])
    np.testing.assert_allclose(rows["virtual"][0], rows["stepped"][2], rtol=1e-5, atol=1e-5)
    assert np.abs(rows["virtual"]).max() > 0
