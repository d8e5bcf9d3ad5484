"""One worker's rounds: no policy of hetjax's own is asked, and no thread is woken."""

import threading

import jax
import numpy as np
import pytest

from hetjax import quota
from tests.rounds import problems


def a_run(**fields):
    return problems.run(48, **{"budget": 4, "cluster": {"num_workers": 1}, **fields})


def test_a_policy_of_ones_own_is_asked_and_none_of_hetjax():
    equal, asked = quota.equal(), []

    def assign(state, total, caps):
        asked.append(total)
        return equal.assign(state, total, caps)

    with a_run(quota={"policy": equal._replace(assign=assign)}) as run, a_run() as like:
        state, other = run.init(), like.init()
        begun = other.rounds.policies
        for _ in range(4):  # the third ends the epoch
            state, report = run.round(state)
            other, expected = like.round(other)
            assert (
                report.read().quotas
                == expected.read().quotas
                == report.read().workers.microbatches_done
            )
        np.testing.assert_array_equal(run.params(state)[0], like.params(other)[0])
    assert asked == [4, 4, 4, 4]
    jax.tree.map(np.testing.assert_array_equal, begun, other.rounds.policies)


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
