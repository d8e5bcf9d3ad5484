"""MNIST and Fashion-MNIST from their idx files: 60,000 + 10,000 grey images of 28 × 28.

An idx file is a magic number (0, 0, 8 = bytes, number of axes), the length of each axis as a
big-endian int32, and the bytes. Both sets use the same four file names, so each looks in its
own directory first. The images come out as `u8[28, 28, 1]`, in the order of the files.

References:
  Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document
    recognition, Proc. IEEE, 1998.
  H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine
    learning algorithms, 2017, arXiv 1708.07747.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from hetjax.zoo.builders import files

PREFIXES = {"train": "train", "test": "t10k"}
IMAGES = "{}-images-idx3-ubyte.gz"
LABELS = "{}-labels-idx1-ubyte.gz"


def read_idx_pairs(
    read_file: files.ReadFile, image_set: files.ImageSet
) -> Mapping[str, Iterator[files.Record]]:
    """Records of each split. Its two files are read when the first record is asked for."""
    return {
        split: _records(
            read_file, IMAGES.format(prefix), LABELS.format(prefix), image_set.image_shape
        )
        for split, prefix in PREFIXES.items()
    }


def parse(content: bytes, name: str) -> np.ndarray:
    """Reads one gzipped idx file of bytes.

    Args:
      content: the `.gz` file.
      name: what to call it in errors.

    Returns:
      `u8[...]` of the shape that the header gives.

    Raises:
      ValueError: it is not gzip, no idx file of bytes, or longer or shorter than the header says.
        The message names the record where it ends.
    """
    try:
        raw = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name} is not a whole gzip file: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3] or raw[3] == 0:
        raise ValueError(
            f"{name} is not an idx file of bytes: it begins with {raw[:4].hex(' ')}, expected "
            "00 00 08 and the number of axes"
        )
    shape = struct.unpack_from(f">{raw[3]}i", raw, 4)
    body = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if min(shape) <= 0 or body.size != math.prod(shape):
        record = body.size // max(math.prod(shape[1:]), 1)
        raise ValueError(
            f"{name} says that it has {shape[0]:,} records, shape {shape}, "
            f"{math.prod(shape):,} bytes; it has {body.size:,}, and ends at record {record:,}"
        )
    return body.reshape(shape)


def _records(
    read_file: files.ReadFile, images_name: str, labels_name: str, shape: tuple[int, int, int]
) -> Iterator[files.Record]:
    images = parse(read_file(images_name), images_name)
    labels = parse(read_file(labels_name), labels_name)
    if images.shape[1:] != shape[:2] or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{images_name} has shape {images.shape} and {labels_name} {labels.shape}; "
            f"expected (n, {shape[0]}, {shape[1]}) and (n,)"
        )
    files.check_labels(labels, labels_name, num_classes=10)
    yield from zip(images[..., None], labels.tolist(), strict=True)


def _specs(
    facts: tuple[tuple[str, int, str], ...], addresses: tuple[str, ...]
) -> tuple[files.FileSpec, ...]:
    return tuple(
        files.FileSpec(name, size, sha256, tuple(address + name for address in addresses))
        for name, size, sha256 in facts
    )


MNIST = files.ImageSet(
    name="mnist",
    version="1.0.0",
    title="MNIST: 70,000 grey images of 28 x 28 of handwritten digits, in the original order",
    homepage="http://yann.lecun.com/exdb/mnist/",
    citation=(
        "@article{lecun1998gradient, title = {Gradient-based learning applied to document "
        "recognition}, author = {LeCun, Yann and Bottou, Leon and Bengio, Yoshua and Haffner, "
        "Patrick}, journal = {Proceedings of the IEEE}, year = {1998}}"
    ),
    image_shape=(28, 28, 1),
    num_classes=10,
    read=read_idx_pairs,
    files=_specs(
        (
            (
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        (
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
    ),
)

FASHION_MNIST = files.ImageSet(
    name="fashion_mnist",
    version="1.0.0",
    title="Fashion-MNIST: 70,000 grey images of 28 x 28 of clothes, in the original order",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    citation=(
        "@article{xiao2017fashion, title = {Fashion-MNIST: a novel image dataset for "
        "benchmarking machine learning algorithms}, author = {Xiao, Han and Rasul, Kashif and "
        "Vollgraf, Roland}, journal = {arXiv:1708.07747}, year = {2017}}"
    ),
    image_shape=(28, 28, 1),
    num_classes=10,
    read=read_idx_pairs,
    files=_specs(
        (
            (
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    ),
)
