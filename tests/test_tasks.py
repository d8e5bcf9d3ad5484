"""Every task trains by its configuration, on a small set in the original files' form."""

import html
import math
import pathlib
import re

import numpy as np
import pytest

from experiments import tasks, train
from hetjax.zoo import config as config_lib
from hetjax.zoo import datasets
from tests.zoo import array_sets

ROOT = pathlib.Path(__file__).parent.parent
TASKS = {  # configuration: what makes it small, and the metric that it is judged by
    "wikitext2_lstm": ({"vocabulary": 8, "length": 5}, "val_perplexity"),
    "wikitext2_transformer": ({"vocabulary": 8, "length": 5}, "val_perplexity"),
    "sst2_hashed": ({"num_features": 64}, "val_accuracy"),
    "sst2_svd": ({"num_features": 6}, "val_accuracy"),
    "cola_hashed": ({"num_features": 64}, "val_matthews"),
    "cola_svd": ({"num_features": 6}, "val_matthews"),
    "rte_hashed": ({"num_features": 64}, "val_accuracy"),
    "rte_svd": ({"num_features": 6}, "val_accuracy"),
    "m4_weekly": ({"past": 8, "future": 3}, "test_smape"),
}

IMAGES = [  # configuration, model, shape of a made image
    ("cifar10_lenet_papers", "lenet", (16, 16, 3)),
    ("cifar10_resnet8", "resnet8", (8, 8, 3)),
    ("cifar10_resnet8_bn", "resnet8", (8, 8, 3)),
    ("cifar10_resnet18", "resnet18", (8, 8, 3)),
    ("mnist_logistic", "logistic", (28, 28, 1)),
    ("fashion_mnist_mlp", "mlp", (28, 28, 1)),
]


def configured(name, **groups):
    """The checked configuration of a file, with other values of some groups' fields."""
    config = config_lib.load(ROOT / "configs" / f"{name}.py")
    config.update(groups)
    return config_lib.validate(config)


def small(name, folder, monkeypatch, **groups):
    data = {**TASKS[name][0], "dir": str(folder)}
    array_sets.write(folder, configured(name).data.name, monkeypatch)
    size = {"microbatch_size": 2, "budget": 4, "epochs": 2, "data": data}
    return configured(name, **{**size, **groups})


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_by_its_configuration_and_its_report_has_its_metric(
    name, tmp_path, monkeypatch
):
    config = small(name, tmp_path, monkeypatch)
    result = train.train_and_evaluate(config, tmp_path / "run", progress=False)
    summary, metric = result.summary, TASKS[name][1]
    losses = [line["loss"] for line in result.history]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert summary["judged_by"] == metric
    assert math.isfinite(summary[metric])
    assert math.isfinite(summary[f"best_{metric}"])
    assert summary["examples_missing"] == summary["examples_duplicated"] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert metric.replace("_", " ").capitalize() in page
    for said in summary["notes"]:
        assert html.escape(said) in page
    assert "The optimiser is" in summary["notes"][-1]
    if metric.endswith(("perplexity", "matthews", "smape")):
        assert "<h2>Metrics" in page


def open_images(monkeypatch, name, shape):
    """Has a task open images that are bright in the upper or in the lower half: two classes."""
    rng, labels = np.random.default_rng(0), np.arange(32, dtype=np.int32) % 2
    images = rng.integers(0, 128, (32, *shape)).astype(np.uint8)
    halves = images.reshape(32, 2, -1)
    halves[np.arange(32), labels] += np.uint8(120)
    source = datasets.sources.ArraySource({"image": images, "label": labels})
    opened = datasets.Dataset(source, {"test": source}, 10, shape, name)
    monkeypatch.setattr(datasets, "load", lambda *args, **options: opened)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "shape"), IMAGES)
def test_a_task_of_images_learns_what_is_on_them(name, model, shape, tmp_path, monkeypatch):
    open_images(monkeypatch, name, shape)
    groups = {"optimizer": {"warmup_epochs": 0.0, "learning_rate": 0.02}}
    groups["model"] = {"width": 8} if model == "resnet18" else {}
    config = configured(name, microbatch_size=4, epochs=12, **groups)
    assert config.model.name == model
    result = train.train_and_evaluate(config, tmp_path, progress=False)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.summary["test_accuracy"] >= 0.9  # one class alone would have a half
    assert "test accuracy" in (tmp_path / "report.html").read_text().lower()


def test_perplexity_is_that_of_all_words_together(tmp_path, monkeypatch):
    task = tasks.make(small("wikitext2_lstm", tmp_path, monkeypatch))
    found = tasks.hetjax.evaluate(task.params, task.evals["val"], task.metrics_fn)
    tokens = task.evals["val"].arrays["tokens"]
    logits = np.asarray(task.model(tokens), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    told = tokens[:, 1:] >= 0
    assert not told.all()  # the last chunk is filled up
    of_next = np.take_along_axis(chances, np.maximum(tokens[:, 1:, None], 0), -1)[..., 0]
    loss = -np.log(of_next[told]).mean()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)


def test_forecasts_are_measured_beside_the_naive_one(tmp_path, monkeypatch):
    task = tasks.make(small("m4_weekly", tmp_path, monkeypatch))
    found = tasks.hetjax.evaluate(task.params, task.evals["test"], task.metrics_fn)
    arrays = task.evals["test"].arrays
    past, future = arrays["past"], arrays["future"]
    assert future.shape == (6, 13)

    def smape(told):
        return np.mean(200 * np.abs(told - future) / (np.abs(told) + np.abs(future)))

    assert found["naive_smape"] == pytest.approx(smape(past[:, -1:]), rel=1e-5)
    told = past
    for _ in range(5):  # 3 points at a time
        told = np.concatenate([told, np.asarray(task.model(told[:, -8:]))], axis=1)
    assert found["smape"] == pytest.approx(smape(told[:, 8:21]), rel=1e-5)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((3, 1, 2, 4), (3 * 4 - 1 * 2) / math.sqrt(4 * 6 * 5 * 5)),
        ((5, 0, 0, 5), 1.0),
        ((0, 5, 5, 0), -1.0),
        ((4, 6, 0, 0), 0.0),  # one class is always said
    ],
)
def test_matthews_correlation(counts, expected):
    shares = np.array(counts) / sum(counts)
    assert tasks.matthews(*shares) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "groups", "message"),
    [
        ("wikitext2_lstm", {"best_by": "accuracy"}, "best_by: got 'accuracy'"),
        ("sst2_hashed", {"model": {"name": "lstm"}}, "model.name: got 'lstm'"),
    ],
)
def test_what_a_model_cannot_take_or_give_is_told(name, groups, message, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=message):
        tasks.make(small(name, tmp_path, monkeypatch, **groups))


def test_every_task_of_the_table_has_a_configuration_and_a_test():
    named = set(re.findall(r"configs/(\w+)\.py", (ROOT / "docs" / "data.md").read_text()))
    assert named == {*TASKS, *(name for name, *_ in IMAGES)}  # which open these files
