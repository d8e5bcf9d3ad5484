"""`hetjax.evaluate`: weighted means over a source, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hetjax
from hetjax.records import evaluate as evaluate_lib
from tests.rounds import problems, test_tokens


def metrics_fn(params, batch):
    losses = problems.softmax_loss(params, batch, None)
    right = (batch["x"] @ params).argmax(-1).astype(batch["y"].dtype) == batch["y"]
    return {"loss": (losses, problems.example_weights(batch)), "accuracy": right, "y": batch["y"]}


@pytest.mark.parametrize("num_examples", [1, 255, 256, 700])
def test_means_are_those_of_plain_numpy_whatever_the_batches(num_examples, float64):
    data, params = problems.classification(num_examples), problems.initial_weights()
    found = hetjax.evaluate(params, data, metrics_fn)
    logits = data["x"] @ params
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    losses = -np.log(chances[np.arange(num_examples), data["y"]])
    weights = np.maximum(data["x"][:, 0], 0) ** 2
    expected = {
        "loss": (weights * losses).sum() / weights.sum() if weights.sum() else np.nan,
        "accuracy": (logits.argmax(-1) == data["y"]).mean(),
        "y": data["y"].mean(),
    }
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert all(type(value) is float for value in found.values())


def test_tokens_are_weighed_each_by_itself(float64):
    data, params = test_tokens.sentences(), problems.initial_weights()

    def by_token(params, batch):
        losses = test_tokens.token_losses(params, batch)
        return {
            "loss": (losses, batch["mask"]),
            "right": (test_tokens.is_right(params, batch), batch["mask"]),
        }

    found = hetjax.evaluate(params, data, by_token)
    (loss, accuracy, _), _ = test_tokens.pooled(params, data, range(203))
    assert found == pytest.approx({"loss": loss, "right": accuracy}, rel=1e-12)


def test_any_source_and_any_device_will_do():
    data, params = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    items = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    found = [
        hetjax.evaluate(params, source, metrics_fn, device=device)
        for source in (data, items)
        for device in (None, jax.devices()[3])
    ]
    assert found[1:] == found[:1] * 3


def test_flax_models_are_evaluated_without_dropout():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.drop = nnx.Linear(5, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.dense(x))

    model, data = Model(nnx.Rngs(0)), problems.classification(61, np.float32)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    right = hetjax.nnx_metrics(model, lambda m, b: {"sum": m(b["x"]).sum(-1)})
    model.eval()
    expected = float(model(data["x"]).sum(-1).mean())
    assert hetjax.evaluate(params, data, right)["sum"] == pytest.approx(expected, rel=1e-5)


def test_a_function_of_a_model_is_refused_with_what_makes_it_one_of_parameters():
    data, params = {"x": np.ones((16, 5), np.float32)}, {"w": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=r"no function .*hetjax\.nnx_metrics.*linen_metrics"):
        hetjax.evaluate(params, data, lambda model, batch: {"sum": model(batch["x"])})


def test_a_second_call_traces_nothing():
    traced = []

    def counted(params, batch):
        traced.append(1)
        return metrics_fn(params, batch)

    data, params = problems.classification(300, np.float32), problems.initial_weights(np.float32)
    hetjax.evaluate(params, data, counted)
    before = len(traced)
    hetjax.evaluate(params, data, counted)
    assert len(traced) <= before + 2  # its shapes alone: no program is made
    adders = [evaluate_lib.metrics_of_loss(problems.softmax_loss) for _ in range(2)]
    assert adders[0] is adders[1]


def test_a_function_that_has_no_hash_is_evaluated():
    class Metrics:
        __hash__ = None

        def __call__(self, params, batch):
            return metrics_fn(params, batch)

    data, params = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    found = hetjax.evaluate(params, data, Metrics())
    assert found == hetjax.evaluate(params, data, metrics_fn)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (problems.softmax_loss, r"metrics_fn is the function softmax_loss.*\(params, examples\)"),
        (None, r"metrics_fn is None; it must be a function"),
        (lambda p, b: b["x"][:, 0], r"returned ShapeDtypeStruct; it must return a dict"),
        (lambda p, b: {"a": b["z"]}, r"KeyError 'z'.*an example has \['x', 'y'\]"),
        (
            lambda p, b: {"a": b["x"]},
            r"'a' of shape \(61, 5\) for 61 examples; .*\(values, weights\)",
        ),
        (lambda p, b: {"a": (b["x"], b["y"])}, r"\(61, 5\), with weights \(61,\)"),
        (lambda p, b: {"a": b["x"].mean()}, r"'a' of shape \(\) for 61 examples"),
    ],
)
def test_what_is_no_metric_is_refused(function, message):
    data, params = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    with pytest.raises(ValueError, match=message):
        hetjax.evaluate(params, data, function)
    with pytest.raises(ValueError, match="a source cannot be made of int"):
        hetjax.evaluate(params, 3, metrics_fn)


def test_a_weight_of_0_leaves_no_mean():
    data, params = problems.classification(61, np.float32), problems.initial_weights(np.float32)

    def nothing(params, batch):
        return {"a": (jnp.ones(len(batch["y"])), jnp.zeros(len(batch["y"])))}

    assert np.isnan(hetjax.evaluate(params, data, nothing)["a"])


def test_a_loss_with_a_key_an_example_is_evaluated(float64):
    def noisy(weights, batch, keys):
        losses = problems.softmax_loss(weights, batch, None)
        return losses + jax.vmap(jax.random.normal)(keys).astype(losses.dtype)

    data, weights = problems.classification(300), problems.initial_weights()
    result = problems.fit(
        data, weights, loss_fn=noisy, per_example_rng=True, epochs=1, eval_source=data
    )
    plain = np.asarray(problems.softmax_loss(result.params, data, None)).mean()
    noise = result.summary["test_loss"] - plain
    assert 0 < abs(noise) < 5 / np.sqrt(300)


def test_a_metric_of_means_is_the_function_of_the_means_over_the_whole_set(float64):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=700), "w": rng.uniform(size=700)}

    def metrics_fn(params, batch):
        values, weighted = batch["x"] * params, (batch["x"] ** 2, batch["w"])
        made = hetjax.OfMeans(lambda a, b: a / b, values, weighted)  # another one at each call
        return {"value": values, "ratio": made}

    found = hetjax.evaluate(np.float64(3.0), data, metrics_fn)
    mean = 3 * data["x"].mean()
    assert found["value"] == pytest.approx(mean, rel=1e-12)
    weighted = (data["w"] * data["x"] ** 2).sum() / data["w"].sum()
    assert found["ratio"] == pytest.approx(mean / weighted, rel=1e-12)


def test_a_part_of_a_metric_of_means_is_checked_as_a_metric_is():
    def metrics_fn(params, batch):
        return {"ratio": hetjax.OfMeans(float, batch["x"].sum())}

    with pytest.raises(ValueError, match=r"metrics_fn returned 'ratio' of shape \(\) for 3 examp"):
        hetjax.evaluate(np.float32(1), {"x": np.ones(3, np.float32)}, metrics_fn)
