"""One worker's rounds: nobody is asked for quotas, and no thread is woken."""

import threading

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax import quota
from tests.rounds import problems


def _refuses(*_):
    raise AssertionError("one worker has no choice of quotas")


def a_run(**fields):
    fields = {"microbatch_size": 4, "budget": 4, "workers": 1, **fields}
    data = problems.classification(48, np.float32)
    weights = problems.initial_weights(np.float32)
    return hetjax.Run(problems.softmax_loss, weights, optax.sgd(0.1), data, **fields)


def test_no_policy_is_asked_and_none_looked_at():
    silent = quota.QuotaPolicy(lambda num_workers, budget: np.zeros(1), _refuses, _refuses)
    with a_run(quota={"policy": silent}) as run, a_run() as like:
        state, other = run.init(), like.init()
        for _ in range(4):  # the third ends the epoch
            state, report = run.round(state)
            other, expected = like.round(other)
            assert report.quotas == expected.quotas
            assert report.microbatches_done == expected.microbatches_done
        np.testing.assert_array_equal(run.params(state)[0], like.params(other)[0])


@pytest.mark.parametrize("local", ["stepped", "fused"])
def test_the_host_works_once_a_round_in_the_calling_thread(local):
    with a_run(local=local) as run:
        state, called = run.init(), []
        for _ in range(3):
            state, _ = run.round(state, meanwhile=lambda: called.append(threading.current_thread()))
        assert called == [threading.current_thread()] * 3


def test_it_makes_no_thread():
    before = {thread.name for thread in threading.enumerate()}
    with a_run() as run:
        state, _ = run.round(run.init())
        jax.block_until_ready(state.train)
        now = {thread.name for thread in threading.enumerate()} - before
        assert not [name for name in now if "worker" in name]
