"""Images with polluted training labels, clean validation labels, and a test set."""

import functools
from typing import NamedTuple

import numpy as np

from experiments.bilevel import settings


class Images(NamedTuple):
    images: np.ndarray  # f32[n, d], 0 to 1
    labels: np.ndarray  # i32[n]


class Data(NamedTuple):
    train: Images  # labels polluted
    validation: Images
    test: Images
    is_right: np.ndarray  # bool[num_train]: the label is the true one
    is_drawn: np.ndarray  # bool[num_train]: the label was drawn anew, and may be the true one
    num_classes: int


def make(config: settings.Data, seed: int) -> Data:
    """Draws the three parts, and the labels of a part of the training images from all classes.

    About one drawn label in ten is the true one. With the digits the parts come from all 1,797
    images; with the others training and validation come from the training images, and the test
    images are the data set's own.

    Raises:
        ValueError: there are not so many images.
    """
    pool, tests = _read(config.name, config.dir)
    rng = np.random.default_rng(seed)
    wanted = config.num_train + config.num_validation
    num_tests = len(pool.labels) - wanted if tests is None else len(tests.labels)
    if wanted > len(pool.labels) or (tests is None and num_tests < max(config.num_test, 1)):
        raise ValueError(
            f"data.num_train: {config.num_train} training and {config.num_validation} validation "
            f"images, and {config.num_test or 1} or more to test, but {config.name!r} has "
            f"{len(pool.labels)} in all. Lower data.num_train, data.num_validation or "
            "data.num_test"
        )
    if config.num_test > num_tests:
        raise ValueError(
            f"data.num_test: got {config.num_test}, but {config.name!r} leaves {num_tests} to "
            "test. Lower it, or set it to 0 for all"
        )
    order = rng.permutation(len(pool.labels))
    train = _taken(pool, order[: config.num_train])
    validation = _taken(pool, order[config.num_train : wanted])
    if tests is None:  # from the end: the same images, whatever comes before
        test = _taken(pool, order[len(order) - (config.num_test or num_tests) :])
    else:
        test = _taken(tests, np.arange(config.num_test or num_tests))
    drawn = rng.permutation(config.num_train)[: round(config.polluted_fraction * config.num_train)]
    labels = train.labels.copy()
    labels[drawn] = rng.integers(0, 10, len(drawn))
    is_drawn = np.zeros(config.num_train, bool)
    is_drawn[drawn] = True
    return Data(
        Images(train.images, labels),
        validation,
        test,
        labels == train.labels,
        is_drawn,
        num_classes=10,
    )


def _taken(images: Images, rows: np.ndarray) -> Images:
    return Images(images.images[rows], images.labels[rows])


@functools.lru_cache(maxsize=2)
def _read(name: str, directory: str) -> tuple[Images, Images | None]:
    """The images to draw from, and those to test on where the data set has its own."""
    if name == "digits":
        from hetjax.zoo.builders import digits

        images, labels = digits.parse(digits.NPZ.read_bytes(), digits.NPZ.name)
        return _scaled(images, labels, digits.MAX_PIXEL), None
    from hetjax.data import sources
    from hetjax.zoo import datasets

    opened = datasets.load(name, directory or None)
    train, test = (sources.load_all(part).arrays for part in (opened.train, opened.test))
    return tuple(_scaled(part["image"], part["label"], 255) for part in (train, test))


def _scaled(images: np.ndarray, labels: np.ndarray, most: int) -> Images:
    flat = np.asarray(images).reshape(len(images), -1).astype(np.float32) / most
    return Images(flat, np.asarray(labels).astype(np.int32))
