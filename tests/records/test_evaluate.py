"""`hetjax.evaluate`: weighted means over a source, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.records import evaluate as evaluate_lib
from tests.rounds import problems, test_tokens


def metrics_fn(params, batch):
    losses = problems.softmax_loss(params, batch, None)
    right = (batch["x"] @ params).argmax(-1).astype(batch["y"].dtype) == batch["y"]
    return {"loss": (losses, problems.example_weights(batch)), "accuracy": right, "y": batch["y"]}


@pytest.mark.parametrize("num_examples", [1, 256, 700])
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


OUTSIDE = {}  # what functions below read, which changes between two calls


def read(kind, x):
    scale = OUTSIDE[kind]
    return {kind: x * scale} if kind != "means" else {kind: hetjax.OfMeans(lambda m: m * scale, x)}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("number", float),
        ("host", lambda scale: np.full(256, scale, np.float32)),
        ("device", lambda scale: jnp.full(256, scale, jnp.float32)),
        ("means", float),
    ],
)
@pytest.mark.parametrize("inside", [lambda read: read, jax.checkpoint, lambda read: jax.jit(read)])
def test_what_a_function_reads_from_outside_is_what_it_is_now(kind, made, inside):
    data = {"x": np.ones(256, np.float32)}

    def metrics_fn(params, batch):
        return inside(lambda x: read(kind, x + params))(batch["x"])

    for scale in (1.0, 100.0, 1.0, 3.0):
        OUTSIDE[kind] = made(scale)
        assert hetjax.evaluate(np.float32(1), data, metrics_fn) == {kind: 2 * scale}


@pytest.mark.parametrize("keeps_state", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_second_run_is_judged_by_what_its_functions_read_now(keeps_state, own):
    data = {"x": np.ones(48, np.float32)}

    def loss_fn(params, *given):
        found = OUTSIDE["loss"] * (params - given[-2]["x"]) ** 2
        return (found, given[0]) if keeps_state else found

    def metrics_fn(params, *given):
        return {"loss" if OUTSIDE["loss"] < 5 else "other": OUTSIDE["loss"] * given[-1]["x"]}

    options = {"model_state": np.zeros(1, np.float32)} if keeps_state else {}
    options |= {"metrics_fn": metrics_fn} if own else {}
    options |= {"workers": 2, "local": "virtual", "budget": 4, "microbatch_size": 4, "epochs": 1}
    options |= {"eval_source": data, "progress": False}
    given = (loss_fn, np.zeros((), np.float32), optax.sgd(0.0), data)
    for scale in (1.0, 100.0, 2.0):
        OUTSIDE["loss"] = scale
        found = hetjax.fit(*given, **options).summary
        name = "test_other" if own and scale > 5 else "test_loss"
        assert found[name] == found["train_loss"] == scale
        assert found.get(f"best_{name}", scale) == scale


def collects(given):
    return lambda params, batch: {"a": hetjax.Collected(*given(batch["x"]))}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (problems.softmax_loss, r"metrics_fn is the function softmax_loss.*\(params, examples\)"),
        (lambda p, b: b["x"][:, 0], "metrics_fn returned ShapeDtypeStruct; must be a dict"),
        (lambda p, b: {"a": (b["x"], b["y"])}, r"'a' as float32\[61, 5\] with weights \w+\[61\]"),
        (lambda p, b: {"a": hetjax.OfMeans(float, b["x"].mean())}, r"'a' as float32\[\]; allowed"),
        (lambda model, b: {"sum": model(b["x"])}, r"no function .*hetjax\.nnx_metrics"),
        (collects(lambda x: (len, x.mean())), r"Collected 'a' of float32\[\]; .*\[61, …\]"),
        (collects(lambda x: (len, (x, x))), r"Collected 'a' of \(.*; .*\[61, …\]"),
        (collects(lambda x: (np.sort, x[:, 0])), r"'a', numpy:sort, .*float32\[61\].*one num"),
    ],
)
def test_what_is_no_metric_is_refused(function, message):
    data, params = problems.classification(61, np.float32), {"w": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=message):
        hetjax.evaluate(params, data, function)
    with pytest.raises(ValueError, match="a source cannot be made of int"):
        hetjax.evaluate(params, 3, metrics_fn)


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


def auc(scores, truths):
    """By ranks, ties sharing theirs; of one class alone it is not defined."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positives, negatives = truths.sum(), (~truths).sum()
    return (ranks[truths].sum() - positives * (positives + 1) / 2) / (positives * negatives)


def auc_slowly(scores, truths):
    """The share of pairs, one of each class, in the right order; a tie is half a pair."""
    differences = np.subtract.outer(scores[truths], scores[~truths])
    return np.mean((differences > 0) + 0.5 * (differences == 0))


@pytest.mark.parametrize("num_examples", [37, 256, 301])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"workers": 1},
        {"workers": 4, "data": {"feed": "streamed"}},
        {"workers": 3, "local": "virtual", "ema": 0.5},
        {"workers": 2, "debug": True},
    ],
    ids=str,
)
def test_what_is_collected_is_all_of_the_set_in_its_order(how, num_examples, float64):
    """AUC is no mean of the batches' AUC, and padding would count among its pairs."""
    data, params = problems.classification(num_examples), problems.initial_weights()
    handed = []

    def keep(rows, truths):
        handed.append((rows, truths))
        return len(rows)

    def metrics_fn(params, batch):
        scores = jnp.round(batch["x"] @ params, 1)[:, 0]  # with ties
        truths = batch["y"] == 0
        kept = hetjax.Collected(keep, batch["x"].astype(jnp.bfloat16), truths)
        made = {"auc": hetjax.Collected(auc, scores, truths), "kept": kept}
        return {**made, "loss": scores**2, "other": hetjax.OfMeans(float, scores)}

    if how:
        fields = {"microbatch_size": 4, "budget": 4, "epochs": 1, "progress": False, **how}
        given = {"eval_source": data, "metrics_fn": metrics_fn, "best_by": "auc"}
        train, step = problems.classification(32), optax.sgd(0.0)
        result = hetjax.fit(problems.softmax_loss, params, step, train, **given, **fields)
        found = {name: result.summary[f"test_{name}"] for name in ("auc", "kept", "other")}
        assert result.summary["best_test_auc"] == found["auc"]
    else:
        found = hetjax.evaluate(params, data, metrics_fn)
    scores, truths = np.round(data["x"] @ params, 1)[:, 0], data["y"] == 0
    exact = 1e-8 if how else 1e-12  # a summary has 9 digits
    assert found["auc"] == pytest.approx(auc_slowly(scores, truths), rel=exact)
    assert found["other"] == pytest.approx(scores.mean(), rel=exact)
    assert found["kept"] == num_examples
    for rows, classes in handed:
        np.testing.assert_array_equal(rows, data["x"].astype(rows.dtype))
        np.testing.assert_array_equal(classes, truths)
        assert rows.dtype == jnp.bfloat16
