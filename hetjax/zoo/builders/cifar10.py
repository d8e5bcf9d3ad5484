"""CIFAR-10 from its binary files: 50,000 + 10,000 colour images of 32 × 32, ten classes.

A record is one label byte and 3,072 image bytes, channel first. The images come out as
`u8[32, 32, 3]`, in the order of the files: `data_batch_1` to `5`, then `test_batch`.
"""

import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from hetjax.zoo.builders import files

RECORD_BYTES = 1 + 3 * 32 * 32
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"{FOLDER}/data_batch_{number}.bin" for number in range(1, 6))
TEST = f"{FOLDER}/test_batch.bin"

SHA256 = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)


def read_cifar10(
    read_file: files.ReadFile, image_set: files.ImageSet
) -> Mapping[str, Iterator[files.Record]]:
    """Records of each split; a file is read when its first record is asked for."""
    del image_set
    return {"train": _records(read_file, TRAIN), "test": _records(read_file, (TEST,))}


def parse(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads one binary file.

    Args:
      content: the file, a whole number of records of 3,073 bytes.
      name: what to call it in errors.

    Returns:
      Images `u8[n, 32, 32, 3]` and labels `u8[n]`.

    Raises:
      ValueError: it has no whole number of records, or a label is above 9. The message names the
        record.
    """
    if len(content) == 0 or len(content) % RECORD_BYTES:
        raise ValueError(
            f"{name} has {len(content):,} bytes, which is not a whole number of records of "
            f"{RECORD_BYTES:,}: record {len(content) // RECORD_BYTES} is cut off"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    files.check_labels(records[:, 0], name, num_classes=10)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0]


def _records(read_file: files.ReadFile, names: tuple[str, ...]) -> Iterator[files.Record]:
    for name in names:
        images, labels = parse(read_file(name), pathlib.PurePath(name).name)
        yield from zip(images, labels.tolist(), strict=True)


CIFAR10 = files.ImageSet(
    name="cifar10",
    version="1.0.0",
    title="CIFAR-10: 60,000 colour images of 32 x 32 in ten classes, in the original order",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    citation=(
        "@TECHREPORT{Krizhevsky09learningmultiple, author = {Alex Krizhevsky}, title = "
        "{Learning multiple layers of features from tiny images}, institution = {University "
        "of Toronto}, year = {2009}}"
    ),
    image_shape=(32, 32, 3),
    num_classes=10,
    files=tuple(
        files.FileSpec(name, 10_000 * RECORD_BYTES, sha256)
        for name, sha256 in zip((*TRAIN, TEST), SHA256, strict=True)
    ),
    read=read_cifar10,
    archive=files.FileSpec(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    ),
)
