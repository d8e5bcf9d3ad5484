"""What a worker hands in by fewer bytes: what arrives, how many they are, what comes later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import types, wires
from hetjax.local import gradients, wired
from tests.rounds import problems

FEWER = wires.WIRES[1:]
SIZES = (1, 63, 64, 65, 1000)


def drawn(size):
    """Of many magnitudes, with blocks that are 0."""
    rng = np.random.default_rng(size)
    numbers = rng.normal(size=size) * np.exp(5 * rng.normal(size=size))
    numbers[: size // 3] = 0
    return numbers.astype(np.float32)


def oracle(numbers, wire):
    """The two numbers between which each is rounded, one after the other."""
    found = []
    for start in range(0, numbers.size, wires.BLOCK):
        block = numbers[start : start + wires.BLOCK].astype(np.float64)
        if wire == "bfloat16":
            steps = [2.0 ** (np.floor(np.log2(abs(x))) - 7) if x else 1.0 for x in block]
        else:
            most = {"int8": 127, "int4": 7}[wire]
            scale = 2.0**-126
            while abs(block).max() > most * scale:
                scale *= 2
            steps = [scale] * block.size
        found += [
            (np.floor(x / s) * s, np.ceil(x / s) * s) for x, s in zip(block, steps, strict=True)
        ]
    return np.array(found).T


@pytest.mark.parametrize("wire", FEWER)
@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_rounded_up_or_down(size, wire):
    numbers = drawn(size)
    found = np.asarray(wires.rounded(jnp.asarray(numbers), wire))
    low, high = oracle(numbers, wire)
    assert np.all((found == low) | (found == high))


@pytest.mark.parametrize("wire", FEWER)
def test_numbers_are_right_in_the_mean(wire):
    numbers = np.random.default_rng(0).normal(size=256).astype(np.float32)
    low, high = oracle(numbers, wire)
    others = jnp.asarray(np.arange(2000, dtype=np.float32))  # which change what is drawn

    def one(other):
        return wires.rounded(jnp.concatenate([jnp.asarray(numbers), other[None] * 1e-30]), wire)

    found = np.asarray(jax.lax.map(one, others))[:, :256]
    deviation = (high - low).max() / 2 / np.sqrt(len(others))
    np.testing.assert_allclose(found.mean(axis=0), numbers, atol=5 * deviation)


@pytest.mark.parametrize("wire", FEWER)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_rounded_is_packed_exactly(size, wire):
    numbers = np.asarray(wires.rounded(jnp.asarray(drawn(size)), wire))
    sent = wires.packed(numbers, wire)
    assert sent.nbytes == wires.num_bytes(size, wire)
    np.testing.assert_array_equal(wires.unpacked(sent, size, wire), numbers)


@pytest.mark.parametrize(("wire", "most"), [("bfloat16", 0.51), ("int8", 0.27), ("int4", 0.15)])
def test_contributions_have_fewer_bytes(wire, most):
    assert wires.num_bytes(62_006, wire) / wires.num_bytes(62_006, wires.FLOAT32) <= most


@pytest.mark.parametrize("wire", FEWER)
def test_what_is_left_is_handed_in_later(wire):
    """All that has arrived and what is left are all that was computed."""
    plain = gradients.gradient_sums(problems.softmax_loss)
    data, weights = problems.given(64)
    shared = types.Shared(jnp.asarray(weights, jnp.float32), ())

    def handed_in(rule, worker, ids):
        batch = {name: leaf[ids] for name, leaf in data.items()}
        microbatch = types.Microbatch(
            examples=batch, example_ids=jnp.asarray(ids), example_mask=jnp.ones(len(ids))
        )
        worker, sums = rule.begin(shared, worker)
        worker, sums = rule.add(shared, worker, sums, microbatch, jax.random.key(0))
        return rule.finish(shared, worker, sums)[:2]

    rule, arrived, computed = wired.wired(plain, wire), 0.0, 0.0
    worker = rule.init(shared.params)
    for ids in np.arange(64).reshape(-1, 4):
        worker, given = handed_in(rule, worker, ids)
        arrived += np.asarray(given, np.float64)
        computed += np.asarray(handed_in(plain, (), ids)[1], np.float64)
    left = np.asarray(worker[1]).reshape(computed.shape)
    assert abs(left).max() > 0
    np.testing.assert_allclose(arrived + left, computed, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", [None, "local_steps", "keep"])
def test_a_run_learns_as_well(rule):
    losses = {}
    for wire in wires.WIRES:
        made = rule and hetjax.local_steps(optax.sgd(0.2, momentum=0.5), keep=rule == "keep")
        found = problems.train(
            64,
            rule=made,
            optimizer=optax.sgd(0.5),
            local="virtual",
            reducer=hetjax.topology.all_reduce(wire=wire),
            epochs=6,
        )
        losses[wire] = found.history[-1]["loss"]
    np.testing.assert_allclose([losses[w] for w in FEWER], losses[wires.FLOAT32], rtol=0.05)


@pytest.mark.parametrize("fields", [{"local": "stepped"}, {"local": "fused"}])
def test_collectives_refuse_it(fields):
    with pytest.raises(ValueError, match=r"reducer\.wire: got 'int8', and collectives add up"):
        problems.train(64, reducer=hetjax.topology.all_reduce(wire="int8"), **fields)


def test_gossip_has_none():
    with pytest.raises(ValueError, match="wire: 'd_psgd' has no such option"):
        hetjax.topology.d_psgd("ring", wire="int8")


def test_weights_of_the_parameters_refuse_it():
    def loss(w, batch, rng):
        losses = (batch["x"] @ w - batch["y"]) ** 2
        return hetjax.Losses(losses, weights=jnp.exp(-losses))

    with pytest.raises(ValueError, match=r"reducer\.wire: got 'int4', and the weights of loss_fn"):
        hetjax.fit(
            loss,
            jnp.zeros(2),
            optax.sgd(0.1),
            {"x": np.ones((16, 2), np.float32), "y": np.ones(16, np.float32)},
            local="virtual",
            microbatch_size=4,
            reducer=hetjax.topology.all_reduce(wire="int4"),
            progress=False,
        )
