"""The signs that a step of one's own returns; wrong sizes and mixed examples are refused."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import ordering, topology
from hetjax.local import gradients, rules
from hetjax.rounds import sync
from tests.rounds import problems
from tests.rounds.order_reference import Balancer, example_gradients


def test_a_loss_that_mixes_examples_is_refused_by_orders_that_add_up_single_gradients():
    def loss_fn(weights, batch, rng):
        centred = {**batch, "x": batch["x"] - batch["x"].mean(axis=0, keepdims=True)}
        return problems.softmax_loss(weights, centred, rng)

    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    problems.fit(data, weights, loss_fn=loss_fn, epochs=1)
    for start in (weights, np.zeros_like(weights)):  # at zeros all losses are alike
        with pytest.raises(ValueError, match=r"ordering\.method: .*batch statistics"):
            problems.fit(data, start, loss_fn=loss_fn, epochs=1, ordering="grab")


def test_a_step_of_ones_own_returns_the_signs_as_an_order_takes_them(float64):
    """`make_train_step` with `d_grab`: example signs flipped, and a common running sum."""
    data, weights = problems.classification(64), problems.initial_weights()
    counts = np.array([3, 0, 2, 1])
    ids = np.random.default_rng(3).permutation(64)[: 4 * 3 * 4].reshape(4, 3, 4)
    mesh = hetjax.make_worker_mesh(4)
    gradients = [
        [example_gradients(data, weights, ids[w, m]) for m in range(counts[w])] for w in range(4)
    ]
    orders = {"d_grab": ordering.d_grab(block_pairs=1), "d_grab_exact": ordering.d_grab_exact()}
    for method, order in orders.items():
        optimizer = optax.sgd(0.0)
        train_step = hetjax.make_train_step(
            problems.softmax_loss,
            optimizer,
            mesh,
            nominal_examples=48,
            ordering=order,
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
        balancer = Balancer(method, 4, weights.size, 1)
        for _ in range(2):  # the second round begins with a running sum
            state, _, example_signs = step(state, microbatches, counts, jax.random.key(0))
            expected = balancer.round(gradients)
            for worker, right in enumerate(expected):
                np.testing.assert_array_equal(
                    example_signs[worker, : counts[worker]].reshape(-1), right
                )


def test_signs_made_for_other_sizes_are_refused():
    weights, optimizer = problems.initial_weights(np.float32), optax.sgd(0.1)
    mesh = hetjax.make_worker_mesh(4)

    def step(microbatch_size=4, max_microbatches=3):
        train_step = hetjax.make_train_step(
            problems.softmax_loss,
            optimizer,
            mesh,
            nominal_examples=48,
            ordering="d_grab_exact",
            microbatch_size=microbatch_size,
            max_microbatches=max_microbatches,
        )
        state = hetjax.make_train_state(
            weights, optimizer, num_workers=4, mesh=mesh, observer=train_step.observer
        )
        ids = np.arange(48, dtype=np.int32).reshape(4, 3, 4)
        examples = {k: v[ids] for k, v in problems.classification(48, np.float32).items()}
        microbatches = hetjax.Microbatch(ids, np.ones(ids.shape, np.float32), examples)
        return jax.eval_shape(train_step, state, microbatches, np.full(4, 3), jax.random.key(0))

    step()
    for wrong in ({"microbatch_size": 8}, {"max_microbatches": 1}):
        with pytest.raises(ValueError, match=r"observer is made for"):
            step(**wrong)
    with pytest.raises(ValueError, match=r"make_train_step: microbatch_size and max_microbatches"):
        step(max_microbatches=0)
    observer = ordering.d_grab().observer(ordering.Sizes(num_workers=1))
    rule = gradients.gradient_sums(problems.softmax_loss)
    with pytest.raises(ValueError, match=r"observer is made for 1 worker"):
        sync.make_sync(
            optimizer,
            steps=rules.with_observer(rule, observer),
            reducer=topology.all_reduce().for_run(topology.RunFacts(4)),
            num_workers=4,
            nominal_examples=8,
            observer=observer,
        )
