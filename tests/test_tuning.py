"""The size of a microbatch: the smallest that costs nothing, by the program that rounds run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from experiments import tuning
from hetjax import memory

DATA = {"x": np.linspace(0.0, 1.0, 1024, dtype=np.float32)}
FEW = {"x": DATA["x"][:256]}


class Clocked:
    """A loss whose microbatches take as long as `cost(size)` says, by its own clock."""

    def __init__(self, cost):
        self.secs, self.calls, self._cost = 0.0, [], cost

    def clock(self):
        return self.secs

    def _tick(self, x):
        self.calls.append(x.size)
        self.secs += self._cost(x.size)
        return np.float32(0.0)

    def loss(self, params, batch, rng):
        late = jax.pure_callback(self._tick, jax.ShapeDtypeStruct((), jnp.float32), batch["x"])
        return (batch["x"] * params - 1.0) ** 2 + late

    def tune(self, data=DATA, **options):
        options |= {"clock": self.clock, "progress": False}
        return tuning.tune_microbatch(self.loss, np.float32(0.5), data, **options)


def test_the_size_is_where_the_cost_of_an_example_falls_no_more():
    clocked = Clocked(lambda size: 0.001 * max(size, 32))
    found = clocked.tune()
    assert found.microbatch_size == 32
    assert [row.microbatch_size for row in found.rows] == [8, 16, 32, 64, 128, 256]
    assert [round(row.examples_per_sec) for row in found.rows] == [250, 500] + 4 * [1000]
    assert found.stopped == "64 to 256 gained nothing"
    assert max(clocked.calls) == 256  # and nothing larger was tried


@pytest.mark.parametrize(("within", "size"), [(0.03, 1024), (0.05, 256), (0.2, 64)])
def test_a_size_may_lack_as_much_as_is_allowed(within, size):
    """By hand: with 16 + B each, speeds are 0.8, 0.941 and 0.985 of the highest possible."""
    found = Clocked(lambda size: 0.001 * (16 + size)).tune(sizes=(64, 256, 1024), within=within)
    assert found.microbatch_size == size
    assert found.stopped == ""


def test_the_sums_are_added_up_in_place_and_memory_is_told():
    weights = np.zeros((256, 256), np.float32)

    def loss(params, batch, rng):
        return ((batch["x"][:, None] @ params[:1]) ** 2).mean(-1)

    found = tuning.tune_microbatch(loss, weights, FEW, sizes=(8, 256), secs=0.01, progress=False)
    small, large = (row.memory_bytes for row in found.rows)
    # Parameters and sums once each; a second copy of the sums would be another 262,144.
    assert 2 * weights.nbytes <= small < 4 * weights.nbytes
    assert large - small >= 248 * 256 * 4  # of each further example a row of activations


def test_a_device_that_has_no_more_room_ends_the_sizes(monkeypatch):
    def loss(params, batch, rng):
        return ((batch["x"][:, None] * params[None]) ** 2).mean(-1)

    params = np.zeros(4096, np.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda: 1_000_000)
    found = tuning.tune_microbatch(loss, params, DATA, secs=0.01, within=1e-9, progress=False)
    assert found.rows[-1].microbatch_size < 512
    assert found.stopped.endswith("more, and 1.00 MB are free")
    assert found.stopped.startswith(f"microbatches of {2 * found.rows[-1].microbatch_size} need ")
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    with pytest.raises(ValueError, match=r"tune_microbatch: microbatches of 64 need .* give sizes"):
        tuning.tune_microbatch(loss, params, DATA, sizes=(64,), progress=False)


def test_models_with_state_keys_of_examples_and_balanced_orders_are_timed_as_they_are():
    seen = []

    def loss(params, state, batch, rng):
        seen.append((rng.shape, state["mean"].shape))
        return (batch["x"] * params - state["mean"]) ** 2, {"mean": batch["x"].mean()}

    state, params = {"mean": np.float32(0.0)}, np.float32(0.5)
    options = {"sizes": (4, 8), "secs": 0.01, "progress": False, "per_example_rng": True}
    tuning.tune_microbatch(loss, params, FEW, model_state=state, **options)
    assert {((4,), ()), ((8,), ())} <= set(seen)

    def plain(params, batch, rng):
        return ((batch["x"][:, None] * params[None]) ** 2).mean(-1)

    params, options = np.ones(64, np.float32), {"sizes": (8,), "secs": 0.01, "progress": False}
    shuffled, balanced = (
        tuning.tune_microbatch(plain, params, FEW, ordering=ordering, **options).rows[0]
        for ordering in ("random_reshuffling", "d_grab")
    )
    assert balanced.memory_bytes > shuffled.memory_bytes
    np.testing.assert_array_equal(params, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": (0, 8)}, r"sizes is \(0, 8\); it must hold whole numbers from 1 to the 256"),
        ({"slices": {"data": 2}}, "slices is given, and a worker of one device is timed"),
        ({"within": 1.0}, r"within is 1\.0; it must be above 0 and below 1$"),
    ],
)
def test_impossible_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=f"^tune_microbatch: .*{message}"):
        Clocked(lambda size: 1.0).tune(data=FEW, **options)
    loss = hetjax.batch_loss(lambda p, b, rng: b["x"] * p, lambda p, e, mask: (e * mask).sum())
    with pytest.raises(ValueError, match="loss_fn is a batch_loss, whose rounds pass over each"):
        tuning.tune_microbatch(loss, np.float32(1.0), FEW)
