"""The signs that a step of one's own returns; wrong sizes and mixed examples are refused."""

import jax
import numpy as np
import optax
import pytest

from hetjax import ordering, topology
from hetjax.local import gradients, rules
from hetjax.rounds import reduce, sync
from tests.rounds import problems
from tests.rounds.order_reference import Balancer, example_gradients


@pytest.mark.parametrize(
    "order", [ordering.d_grab(block_pairs=1), ordering.d_grab_exact()], ids=["d_grab", "exact"]
)
def test_a_step_of_ones_own_returns_the_signs_as_an_order_takes_them(order, request, float64):
    """Example signs flipped, and a common running sum."""
    data, weights = problems.given()
    counts = np.array([3, 0, 2, 1])
    ids = np.random.default_rng(3).permutation(64)[: 4 * 3 * 4].reshape(4, 3, 4)
    gradients = [
        [example_gradients(data, weights, ids[w, m]) for m in range(counts[w])] for w in range(4)
    ]
    sizes = {"microbatch_size": 4, "max_microbatches": 3}
    step, state, microbatches = problems.own_step(
        ids, data, weights, optax.sgd(0.0), ordering=order, **sizes
    )
    step = jax.jit(step)
    balancer = Balancer(f"d_grab{'_exact' * ('exact' in request.node.name)}", 4, weights.size, 1)
    for _ in range(2):  # the second round begins with a running sum
        state, _, example_signs = step(state, microbatches, counts, jax.random.key(0))
        for worker, right in enumerate(balancer.round(gradients)):
            found = example_signs[worker, : counts[worker]].reshape(-1)
            np.testing.assert_array_equal(found, right)


def test_signs_made_for_other_sizes_are_refused():
    data, weights = problems.given(48)
    ids, optimizer = np.arange(48).reshape(4, 3, 4), optax.sgd(0.1)

    def step(microbatch_size=4, max_microbatches=3):
        sizes = {"microbatch_size": microbatch_size, "max_microbatches": max_microbatches}
        step, *given = problems.own_step(
            ids, data, weights, optimizer, ordering="d_grab_exact", **sizes
        )
        return jax.eval_shape(step, *given, np.full(4, 3), jax.random.key(0))

    step()
    for wrong in ({"microbatch_size": 8}, {"max_microbatches": 1}):
        with pytest.raises(ValueError, match=r"observer is made for"):
            step(**wrong)
    with pytest.raises(ValueError, match=r"make_train_step: microbatch_size and max_microbatches"):
        step(max_microbatches=0)
    observer = ordering.d_grab().observer(ordering.Sizes(num_workers=1))
    rule = gradients.gradient_sums(problems.softmax_loss)
    reducer = topology.all_reduce().for_run(topology.RunFacts(4))
    how, steps = reduce.How(reducer, 4, 8), rules.with_observer(rule, observer)
    with pytest.raises(ValueError, match=r"observer is made for 1 worker"):
        sync.make_sync(how, steps, observer=observer)
