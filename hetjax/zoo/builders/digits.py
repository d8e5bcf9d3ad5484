"""The UCI optical digits, which come with the package: 1,797 grey images of 8 × 8.

Pixels are 0..16 (counts of set bits in 4 × 4 blocks), kept as they are, `u8[8, 8, 1]`. Every
fifth image (i % 5 == 4) is a test image, 359 in all; the other 1,438 are for training, in the
original order. `DIGITS.md` beside `digits.npz` has the attribution; the data are CC BY 4.0.

References:
  E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, doi 10.24432/C50P49.
"""

import io
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from hetjax.zoo.builders import files

NUM_IMAGES = 1_797
MAX_PIXEL = 16
TEST_EVERY = 5
NPZ = pathlib.Path(__file__).with_name("digits.npz")


def read_digits(
    read_file: files.ReadFile, image_set: files.ImageSet
) -> Mapping[str, Iterator[files.Record]]:
    """Records of each split, from the packaged file."""
    del read_file
    splits = _splits()
    assert splits["train"][0].shape[1:] == image_set.image_shape
    return {
        split: zip(images, labels.tolist(), strict=True)
        for split, (images, labels) in splits.items()
    }


def arrays() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The digits as arrays, ready for `hetjax.fit`: no extra, no download, nothing prepared.

    Returns:
      The training set and the test set, 1,438 and 359 examples, each a dict of `image`,
      f32[n, 8, 8, 1] from 0 to 1, and `label`, i32[n] from 0 to 9.

    Example:
      >>> train, test = arrays()
      >>> train["image"].shape, test["label"].shape, float(train["image"].max())
      ((1438, 8, 8, 1), (359,), 1.0)
    """
    train, test = (
        {"image": (images / MAX_PIXEL).astype(np.float32), "label": labels.astype(np.int32)}
        for images, labels in _splits().values()
    )
    return train, test


def _splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each split."""
    images, labels = parse(NPZ.read_bytes(), NPZ.name)
    assert len(images) == NUM_IMAGES
    is_test = np.arange(NUM_IMAGES) % TEST_EVERY == TEST_EVERY - 1
    return {
        split: (images[chosen], labels[chosen])
        for split, chosen in (("train", ~is_test), ("test", is_test))
    }


def parse(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the compressed `.npz`.

    Returns:
      Images `u8[n, 8, 8, 1]`, 0..16, and labels `u8[n]`, 0..9.

    Raises:
      ValueError: it is no such file, or a pixel or label is out of range. The message names the
        record.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except Exception as error:  # a damaged file: errors of zipfile, zlib and NumPy, or a KeyError
        raise ValueError(
            f"{name} cannot be read ({type(error).__name__}: {error}); install hetjax again"
        ) from error
    files.check_labels(labels, name, num_classes=10)
    bright = np.flatnonzero((images > MAX_PIXEL).any(axis=(1, 2)))
    if bright.size:
        raise ValueError(
            f"record {bright[0]} of {name} has pixel {images[bright[0]].max()}, expected "
            f"0..{MAX_PIXEL}"
        )
    return images[..., None], labels


DIGITS = files.ImageSet(
    name="digits",
    version="1.0.0",
    title="UCI optical digits: 1,797 grey images of 8 x 8, pixels 0 to 16 (CC BY 4.0)",
    homepage="https://doi.org/10.24432/C50P49",
    citation=(
        "@misc{alpaydin1998optical, title = {Optical Recognition of Handwritten Digits}, "
        "author = {Alpaydin, E. and Kaynak, C.}, howpublished = {UCI Machine Learning "
        "Repository}, year = {1998}, doi = {10.24432/C50P49}}"
    ),
    image_shape=(8, 8, 1),
    num_classes=10,
    files=(),
    read=read_digits,
)
