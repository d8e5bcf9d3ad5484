"""What a device is given before it has finished; and devices of two platforms as workers."""

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from tests.rounds import problems

QUOTAS = {"policy": "static", "proportions": (4, 3, 1, 0)}


@pytest.mark.parametrize("ordering", ["random_reshuffling", "d_grab"])
def test_depths_agree_to_the_bit(ordering):
    fields = {"epochs": 3, "quota": QUOTAS, "ordering": ordering}
    runs = [problems.train(dispatch_depth=depth, **fields) for depth in (1, 2, 5)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.params, runs[0].params)
        for line, first in zip(run.history, runs[0].history, strict=True):
            assert line["loss"] == first["loss"]
            assert line["microbatches_done"] == first["microbatches_done"]


def test_a_stamp_is_taken_when_its_microbatch_is_done():
    """Each takes 30 ms of the device's own time, whatever the host has dispatched meanwhile."""
    secs, seen = 0.03, []

    def pause(x):
        time.sleep(secs)
        return x

    def loss_fn(weights, batch, rng):
        losses = (batch["x"] @ weights)[:, 0]
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return losses + 0 * jax.pure_callback(pause, shape, jax.lax.stop_gradient(losses.sum()))

    def observe(state, times):
        seen.append((times.first_secs[0], times.compute_secs[0]))
        return equal.observe(state, times)

    equal = hetjax.quota.equal()
    fields = {"quota": equal._replace(observe=observe), "cluster": {"num_workers": 1}}
    fields |= {"loss_fn": loss_fn, "loss_over": "microbatch", "epochs": 1, "budget": 6}
    for depth in (1, 3):
        seen.clear()
        problems.train(48, dispatch_depth=depth, **fields)
        assert len(seen) == 2
        for first, last in seen:
            assert secs < first < last - 4.5 * secs


def test_as_many_are_in_flight_as_the_depth_says():
    """Counted by a gate: how many are asked for that are not finished."""
    in_flight, seen, lock = [0], set(), threading.Lock()

    class Counting(hetjax.gates.AlwaysOpen):
        def begin(self, quotas):
            in_flight[0] = 0

        def is_open(self):
            with lock:
                in_flight[0] += 1
                seen.add(in_flight[0])
            return True

        def finished(self, worker, microbatches_done):
            with lock:
                in_flight[0] -= 1

    def loss_fn(weights, batch, rng):
        for _ in range(8):  # long enough that it is not computed while it is dispatched
            weights = jnp.tanh(weights @ weights)
        return batch["x"] @ weights[0]

    gate = hetjax.gates.first()._replace(open=lambda board, clock: Counting(board))
    fields = {"gate": gate, "quota": "equal", "cluster": {"num_workers": 1}, "epochs": 1}
    given = {"x": np.ones((64, 300), np.float32)}, np.ones((300, 300), np.float32)
    for depth in (1, 3):
        seen.clear()
        problems.fit(*given, loss_fn=loss_fn, dispatch_depth=depth, **fields)
        assert seen == set(range(1, depth + 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dispatch_depth": 2, "local": "fused"}, r"needs local='stepped'"),
        ({"platforms": ("cpu", "cuda"), "local": "virtual"}, r"needs local='stepped'"),
        ({"platforms": ("cpu",)}, r"cluster.platforms: got \('cpu',\), must be \(\)"),
    ],
)
def test_what_needs_calls_or_several_platforms_is_refused_without(fields, message):
    cluster = {"num_workers": 4, "platforms": fields.get("platforms", ())}
    fields = {name: value for name, value in fields.items() if name != "platforms"}
    with pytest.raises(ValueError, match=message):
        problems.train(cluster=cluster, **fields)


def test_devices_of_two_platforms_train_as_those_of_one():
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.rounds.platform_cases"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *cases, closed, adapted, unknown, not_first, too_few = ended.stdout.splitlines()
    assert len(cases) == 6
    for line in cases:
        name, gap = line.split()
        assert float(gap) < 1e-14, name
    processed, left = map(int, closed.split())
    assert processed == 128
    assert left > 0  # by the slow worker, when the gate closed
    assert adapted == "128 4"
    assert "got 'rocket', which JAX has not here" in unknown
    assert "name JAX's default, 'cpu', first" in not_first
    assert "have 2+2 devices; cluster.num_workers=2 must be from 3 to 4" in too_few
