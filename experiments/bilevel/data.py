"""Images with polluted training labels, clean validation labels, and a test set."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import own
from experiments.bilevel import settings
from hetjax import parts
from hetjax.data import sources


class Images(NamedTuple):
    images: Any  # f32[n, d], 0 to 1; of examples of one's own all fields but the label, by name
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
    pool, tests, clean = _own(config) if parts.is_path(config.name) else _read(config)
    rng = np.random.default_rng(seed)
    wanted = config.num_train + (config.num_validation if clean is None else 0)
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
    if clean is not None:
        if config.num_validation > len(clean.labels):
            raise ValueError(
                f"data.num_validation: got {config.num_validation}, but {config.name!r} has "
                f"{len(clean.labels)} to validate. Lower it."
            )
        validation = _taken(clean, rng.permutation(len(clean.labels))[: config.num_validation])
    if tests is None:  # from the end: the same images, whatever comes before
        test = _taken(pool, order[len(order) - (config.num_test or num_tests) :])
    else:
        test = _taken(tests, np.arange(config.num_test or num_tests))
    drawn = rng.permutation(config.num_train)[: round(config.polluted_fraction * config.num_train)]
    labels = train.labels.copy()
    num_classes = int(pool.labels.max()) + 1
    labels[drawn] = rng.integers(0, num_classes, len(drawn))
    is_drawn = np.zeros(config.num_train, bool)
    is_drawn[drawn] = True
    return Data(
        Images(train.images, labels),
        validation,
        test,
        labels == train.labels,
        is_drawn,
        num_classes=num_classes,
    )


def _taken(images: Images, rows: np.ndarray) -> Images:
    return jax.tree.map(lambda leaf: leaf[rows], images)


def _own(config: settings.Data) -> tuple[Images, Images | None, Images | None]:
    """As `_read`, of what a function of one's own loads: sets `train`, `test`, `validation`.

    Raises:
        ValueError: its examples have no labels.
    """
    found = own.dataset(config)
    sets = {"train": found.train, **found.evals}
    read = {name: sources.load_all(each).arrays for name, each in sets.items()}
    for name, arrays in read.items():
        if not isinstance(arrays, dict) or len(arrays) < 2 or "label" not in arrays:
            raise ValueError(
                f"data.name: the set {name!r} of {config.name!r} has {parts.shown(arrays)}; "
                "cleaning wants dicts with 'label', whole numbers from 0, and another field."
            )
    made = {
        name: Images({k: v for k, v in arrays.items() if k != "label"}, arrays["label"])
        for name, arrays in read.items()
    }
    return made["train"], made.get("test"), made.get("validation")


def _read(config: settings.Data) -> tuple[Images, Images | None, None]:
    """The images to draw from, and those to test on where the data set has its own."""
    return *_opened(config.name, config.dir), None


@functools.lru_cache(maxsize=2)
def _opened(name: str, directory: str) -> tuple[Images, Images | None]:
    if name == "digits":
        from hetjax.zoo.builders import digits

        images, labels = digits.parse(digits.NPZ.read_bytes(), digits.NPZ.name)
        return _scaled(images, labels, digits.MAX_PIXEL), None
    from hetjax.zoo import datasets

    opened = datasets.load(name, directory or None)
    train, test = (sources.load_all(part).arrays for part in (opened.train, opened.test))
    return tuple(_scaled(part["image"], part["label"], 255) for part in (train, test))


def _scaled(images: np.ndarray, labels: np.ndarray, most: int) -> Images:
    flat = np.asarray(images).reshape(len(images), -1).astype(np.float32) / most
    return Images(flat, np.asarray(labels).astype(np.int32))
