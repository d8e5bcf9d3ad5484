import dataclasses
import gzip
import hashlib
import struct
import tarfile

import numpy as np
import pytest

from hetjax.data import sources
from hetjax.zoo import datasets
from hetjax.zoo.builders import cifar10, digits, files, mnist, prepared


def spec(name, content, urls=()):
    return files.FileSpec(name, len(content), hashlib.sha256(content).hexdigest(), urls)


def cifar_bytes(count, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, cifar10.RECORD_BYTES), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows


def tiny_cifar10(folder, count=3):
    """Writes the six files of a small CIFAR-10; returns its description and the raw rows."""
    names = (*cifar10.TRAIN, cifar10.TEST)
    rows = [cifar_bytes(count, seed) for seed in range(len(names))]
    specs = []
    for name, content in zip(names, rows, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.tobytes())
        specs.append(spec(name, content.tobytes()))
    return dataclasses.replace(cifar10.CIFAR10, files=tuple(specs), archive=None), rows


def idx_bytes(array):
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def tiny_mnist(folder, train=5, test=3):
    """Writes the four files of a small MNIST; returns its description and the arrays."""
    rng = np.random.default_rng(0)
    arrays, specs = {}, []
    for split, count in (("train", train), ("test", test)):
        image = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        label = rng.integers(0, 10, count, dtype=np.uint8)
        arrays[split] = image, label
        for pattern, array in ((mnist.IMAGES, image), (mnist.LABELS, label)):
            name, content = pattern.format(mnist.PREFIXES[split]), idx_bytes(array)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            specs.append(spec(name, content))
    return dataclasses.replace(mnist.MNIST, files=tuple(specs)), arrays


def test_digits_are_the_packaged_images_in_order_every_fifth_a_test(tmp_path):
    with np.load(digits.NPZ, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert labels[:10].tolist() == list(range(10))  # the UCI file begins so
    assert images.sum() == 561_718
    dataset = datasets.load("digits", tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert (dataset.num_classes, dataset.example_shape) == (10, (8, 8, 1))
    train, test = (sources.load_all(source).arrays for source in (dataset.train, dataset.test))
    is_test = np.arange(1797) % 5 == 4
    assert train["image"].max() == digits.MAX_PIXEL
    for read, part, scaled in zip((train, test), (~is_test, is_test), digits.arrays(), strict=True):
        np.testing.assert_array_equal(read["image"][..., 0], images[part])
        np.testing.assert_array_equal(read["label"], labels[part])
        assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(scaled["image"] * digits.MAX_PIXEL, read["image"])
        np.testing.assert_array_equal(scaled["label"], read["label"])
        assert (scaled["image"].dtype, scaled["label"].dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("is_archived", [False, True])
def test_cifar10_keeps_the_order_and_turns_channels_last(is_archived, tmp_path):
    folder = tmp_path / "cifar10"
    image_set, rows = tiny_cifar10(folder, count=30)
    if is_archived:
        archive = tmp_path / "data" / "cifar-10-binary.tar.gz"
        archive.parent.mkdir()
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder / cifar10.FOLDER, arcname=cifar10.FOLDER)
        image_set = dataclasses.replace(image_set, archive=spec(archive.name, archive.read_bytes()))
    where = tmp_path / "data" if is_archived else tmp_path
    builder = prepared.prepare(image_set, where, download=False)
    train = sources.load_all(builder.as_data_source("train")).arrays
    test = sources.load_all(builder.as_data_source("test")).arrays
    for got, raw in ((train, np.concatenate(rows[:5])), (test, rows[5])):
        np.testing.assert_array_equal(got["label"], raw[:, 0])
        for channel in range(3):
            plane = raw[:, 1 + 1024 * channel : 1 + 1024 * (channel + 1)]
            np.testing.assert_array_equal(got["image"][..., channel].reshape(-1, 1024), plane)


def test_mnist_keeps_the_order(tmp_path):
    image_set, arrays = tiny_mnist(tmp_path / "mnist")
    builder = prepared.prepare(image_set, tmp_path, download=False)
    for split, (image, label) in arrays.items():
        got = sources.load_all(builder.as_data_source(split)).arrays
        np.testing.assert_array_equal(got["image"][..., 0], image)
        np.testing.assert_array_equal(got["label"], label)


def test_a_parse_error_inside_a_preparation_reaches_the_user(tmp_path):
    rows = cifar_bytes(4, 0)
    rows[2, 0] = 11
    image_set, _ = tiny_cifar10(tmp_path)
    (tmp_path / cifar10.TEST).write_bytes(rows.tobytes())
    specs = (*image_set.files[:-1], spec(cifar10.TEST, rows.tobytes()))
    image_set = dataclasses.replace(image_set, files=specs)
    with pytest.raises(ValueError, match=r"record 2 of test_batch.bin has label 11"):
        prepared.prepare(image_set, tmp_path, download=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(np.zeros(4000, np.uint8))[:-9], "not a whole gzip file"),
        (
            gzip.compress(b"\0\0\x08\x02" + struct.pack(">2i", 3, 4) + b"x" * 9, mtime=0),
            "3 records.*12 bytes; it has 9, and ends at record 2",
        ),
    ],
)
def test_a_damaged_idx_file_is_refused(content, message):
    with pytest.raises(ValueError, match=f"x.gz.*{message}"):
        mnist.parse(content, "x.gz")


def test_idx_labels_out_of_range_and_unequal_counts_are_refused(tmp_path):
    def records(image, label):
        contents = {mnist.IMAGES: idx_bytes(image), mnist.LABELS: idx_bytes(label)}
        named = {pattern.format("train"): content for pattern, content in contents.items()}
        return list(mnist.read_idx_pairs(named.__getitem__, mnist.MNIST)["train"])

    image = np.zeros((3, 28, 28), np.uint8)
    with pytest.raises(ValueError, match=r"record 1 of train-labels-idx1-ubyte.gz has label 10"):
        records(image, np.array([0, 10, 3], np.uint8))
    with pytest.raises(ValueError, match=r"\(3, 28, 28\).*\(2,\)"):
        records(image, np.array([0, 1], np.uint8))


def test_missing_files_are_downloaded_and_kept_if_they_are_the_right_ones(tmp_path, capsys):
    image_set, _ = tiny_mnist(tmp_path / "server")
    specs = []
    for file in image_set.files:
        urls = ("file:///nowhere/x", (tmp_path / "server" / file.name).as_uri())
        specs.append(dataclasses.replace(file, urls=urls))
    image_set = dataclasses.replace(image_set, files=tuple(specs))
    read = files.reader(image_set, tmp_path / "data")
    assert len(read(mnist.IMAGES.format("train"))) > 0
    kept = sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir())
    assert kept == sorted(file.name for file in image_set.files)
    assert "downloading" in capsys.readouterr().err
    for path in (tmp_path / "server").iterdir():
        path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ValueError, match=r"mnist is missing: put .*Downloading failed: .*bytes"):
        files.reader(image_set, tmp_path / "other")
    assert list((tmp_path / "other" / "mnist").iterdir()) == []


def test_missing_files_without_network_say_what_to_put_where(tmp_path):
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz, or unpacked") as error:
        prepared.prepare(cifar10.CIFAR10, tmp_path, download=False)
    assert str(tmp_path / "cifar10") in str(error.value)
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in str(error.value)
    with pytest.raises(ValueError, match=r"put train-images-idx3-ubyte.gz, train-labels"):
        prepared.prepare(mnist.FASHION_MNIST, tmp_path, download=False)


@pytest.mark.parametrize("image_set", datasets.IMAGE_SETS.values(), ids=lambda x: x.name)
def test_the_real_files_match_their_checksums_and_parse(image_set, test_data):
    read = files.reader(image_set, test_data, download=False)
    found = image_set.read(read, image_set)
    counts = {split: sum(1 for _ in records) for split, records in found.items()}
    train = {"digits": 1438, "cifar10": 50_000}.get(image_set.name, 60_000)
    assert counts == {"train": train, "test": 359 if image_set.name == "digits" else 10_000}
