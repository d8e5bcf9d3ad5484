"""Crops and flips: each is a move over zeros, and all of them are drawn."""

import dataclasses
import pickle

import numpy as np
import pytest

import hetjax
from experiments import tasks
from hetjax.data import readers, sources
from hetjax.zoo import config, datasets, images


def test_crops_and_flips_are_the_moves_and_mirrors_of_the_image():
    image = np.random.default_rng(0).integers(1, 255, (8, 8, 3)).astype(np.uint8)
    padded = np.zeros((10, 10, 3), np.uint8)
    padded[1:9, 1:9] = image
    wanted = set()
    for top in range(3):
        for left in range(3):
            view = padded[top : top + 8, left : left + 8]
            wanted |= {view.tobytes(), view[:, ::-1].tobytes()}
    found = set()
    for seed in range(300):
        view = images.crops_and_flips({"image": image, "label": 7}, np.random.default_rng(seed))
        assert view["label"] == 7
        assert view["image"].dtype == np.uint8
        found.add(view["image"].tobytes())
    assert found == wanted
    assert len(wanted) == 18


def test_a_configuration_augments_the_training_images_alone():
    given = {"data": {"name": "digits", "augmentation": "crops_and_flips", "num_train": 20}}
    task = tasks.make(config.validate(given))
    assert len(task.train) == 20
    plain = tasks.make(config.validate({"data": {"name": "digits", "num_train": 20}}))
    assert type(task.train) is type(hetjax.augmented([1], lambda example, rng: example))
    assert any(
        not np.array_equal(task.train[i]["image"], plain.train[i]["image"]) for i in range(20)
    )
    for name, source in task.evals.items():
        np.testing.assert_array_equal(source[0]["image"], plain.evals[name][0]["image"])


def test_what_has_no_images_is_refused(monkeypatch):
    dataset = tasks.load(config.validate({}).data)
    given = config.validate({"data": {"augmentation": "crops_and_flips"}})
    words = dataclasses.replace(dataset, kind="features")
    with pytest.raises(ValueError, match="augmentation: got 'crops_and_flips', which is of image"):
        tasks.make(dataclasses.replace(given, model=config.ModelConfig(name="logistic")), words)


def test_images_by_name_can_be_read_by_processes():
    for image_set in datasets.IMAGE_SETS.values():
        assert pickle.loads(pickle.dumps(image_set)) == image_set
    train = tasks.first(datasets.load("digits").train, 40)
    read = sources.load_all(train, crew=readers.asked("processes:2")).arrays
    np.testing.assert_array_equal(read["image"], sources.load_all(train).arrays["image"])
