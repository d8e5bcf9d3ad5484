"""Microbatches of one example, and of odd numbers; orders that need pairs say so."""

import jax
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems
from tests.rounds.order_comparison import made, recorded

VIRTUAL = {"num_workers": 4, "secs_per_microbatch": [1.0, 1.5, 2.0, 4.0], "clock": "virtual"}
RATE = 0.3
IN_PAIRS = ("d_grab", "d_grab_exact", "frozen", "pair_balance", "pair_balance_exact")


@pytest.mark.parametrize(("form", "size"), [("stepped", 1), ("fused", 3), ("virtual", 1)])
def test_each_round_is_the_step_of_its_examples(form, size, float64):
    data, weights = problems.given(50)

    def mean(weights, batch):
        return problems.softmax_loss(weights, batch, None).mean()

    fields = {"local": form, "cluster": VIRTUAL, "microbatch_size": size, "budget": 12}
    grad = jax.grad(mean)
    with problems.run(50, optimizer=optax.sgd(RATE), epochs=2, **fields) as run:
        state, seen = run.init(), []
        while not run.done(state):
            state, report = run.round(state)
            ids = report.done.example_ids
            seen.append(ids[ids >= 0])
            batch = jax.tree.map(lambda leaf, own=seen[-1]: leaf[own], data)
            weights = weights - RATE * np.asarray(grad(weights, batch))
            np.testing.assert_allclose(run.params(state)[0], weights, atol=1e-12)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.repeat(np.arange(50), 2))


@pytest.mark.parametrize("name", sorted({*hetjax.ordering.ORDERINGS} - {*IN_PAIRS}))
@pytest.mark.parametrize("size", [1, 3])
def test_an_order_of_single_examples_is_that_of_any_size(name, size, float64):
    """At parameters that stay, where one worker's signs depend on the sequence alone."""

    def orders(size):
        calls = []
        fields = {"cluster": {"num_workers": 1}, "microbatch_size": size, "budget": 48 // size}
        fields["ordering"] = recorded(made(name, random_scale=1e-3), calls)
        problems.train(48, optimizer=optax.sgd(0.0), epochs=3, **fields)
        return np.concatenate([examples for examples, _ in calls])

    np.testing.assert_array_equal(orders(size), orders(4))


def test_an_order_of_pairs_says_that_it_needs_even_ones():
    with pytest.raises(ValueError, match="microbatch_size: got 3, must be even"):
        problems.train(48, ordering="d_grab", microbatch_size=3)
