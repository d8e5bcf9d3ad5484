import contextlib
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from hetjax.data import sources
from hetjax.zoo import datasets, prepare
from hetjax.zoo.builders import digits, files, prepared

PATIENCE_SECS = 300  # a few are usual, where the machine is not busy
FOLDER = "hetjax_digits/1.0.0"


def run_quietly(args, capfd):
    code = prepare.main(args)
    return code, capfd.readouterr()


def test_the_command_says_where_and_how_many(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HETJAX_DATA_DIR", str(tmp_path))
    code, output = run_quietly(["digits"], capfd)
    assert code == 0
    assert (tmp_path / FOLDER / "dataset_info.json").is_file()
    assert output.out == f"digits: train 1,438, test 359 examples in {tmp_path / FOLDER}\n"
    assert output.err == f"hetjax: preparing digits in {tmp_path / FOLDER}\n"
    monkeypatch.delenv("HETJAX_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.default_data_dir() == tmp_path / ".cache" / "hetjax"
    code, output = run_quietly(["digits", f"--data_dir={tmp_path}"], capfd)
    assert code == 0
    assert output.err == ""


def test_an_unknown_name_gets_the_nearest_right_one_and_exit_code_2(capfd):
    code, output = run_quietly(["digits", "cifra-10"], capfd)
    assert code == 2
    assert "unknown data set 'cifra-10' (did you mean 'cifar10'?)" in output.err
    assert "digits, cifar10, fashion_mnist, mnist" in output.err


def test_processes_that_prepare_the_same_set_at_once_all_get_it(tmp_path):
    command = [sys.executable, "-m", "hetjax.zoo.prepare", "digits", f"--data_dir={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=PATIENCE_SECS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("preparing" in err for _, err in outputs) == 1
    assert not list(tmp_path.rglob("incomplete*"))


def test_an_interrupted_preparation_is_not_taken_for_a_data_set(tmp_path):
    def interrupted(read_file, image_set):
        def records(split):
            yield from digits.read_digits(read_file, image_set)[split]
            raise KeyboardInterrupt

        return {"train": records("train"), "test": records("test")}

    broken = dataclasses.replace(digits.DIGITS, read=interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        prepared.prepare(broken, tmp_path)
        pytest.fail("the interruption was swallowed")
    assert not (tmp_path / FOLDER).exists()
    assert len(datasets.load("digits", tmp_path).train) == 1438


def test_a_damaged_record_is_named_by_its_index_and_a_lost_file_by_its_name(tmp_path):
    datasets.load("digits", tmp_path)
    path = tmp_path / FOLDER / "hetjax_digits-train.array_record-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
    train = datasets.load("digits", tmp_path).train
    unreadable = []
    for index in range(len(train)):
        try:
            train[index]
        except RuntimeError:
            unreadable.append(index)
    message = rf"example {unreadable[0]} of ArrayRecordDataSource in .* cannot be read.*[Cc]orrupt"
    with pytest.raises(ValueError, match=message):
        sources.load_all(train)
    with pytest.raises(ValueError, match=message):
        sources.fetch(train, np.array([0, 1, unreadable[0]]))
    path.unlink()
    with pytest.raises(ValueError, match=r"digits in .* is damaged: hetjax_digits-train.*missing"):
        datasets.load("digits", tmp_path)


def test_a_prepared_tfds_data_set_opens_by_its_name(tmp_path):
    datasets.load("digits", tmp_path)
    for name in ("hetjax_digits", "hetjax_digits:1.0.0"):
        dataset = datasets.load(name, tmp_path)
        assert (len(dataset.train), len(dataset.test)) == (1438, 359)
        assert (dataset.num_classes, dataset.example_shape) == (None, (8, 8, 1))
    source = tfds.data_source("hetjax_digits", data_dir=str(tmp_path), split="train")
    np.testing.assert_array_equal(source[7]["image"], dataset.train[7]["image"])


class Shapes(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A user's own TFDS data set, with a configuration and no test split."""

    name = "shapes"
    VERSION = tfds.core.Version("2.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="small")]  # noqa: RUF012

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "points": tfds.features.Tensor(shape=(2,), dtype=np.float32),
                "label": tfds.features.ClassLabel(num_classes=3),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(5), "validation": self._generate_examples(3)}

    def _generate_examples(self, count):
        for index in range(count):
            yield index, {"points": np.full(2, index, np.float32), "label": index % 3}


def test_validation_stands_in_for_test_and_another_format_must_be_prepared_again(tmp_path):
    Shapes(data_dir=str(tmp_path)).download_and_prepare(
        file_format="array_record", download_dir=str(tmp_path / "downloads")
    )
    dataset = datasets.load("shapes/small:2.0.0", tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (5, 3)
    assert (dataset.num_classes, dataset.example_shape) == (3, None)
    batch = sources.fetch(dataset.train, np.arange(5))
    assert batch["label"].tolist() == [int(x) % 3 for x in batch["points"][:, 0]]
    path = tmp_path / "shapes" / "small" / "2.0.0" / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match=r"is tfrecord, .*--file_format=array_record"):
        datasets.load("shapes", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digitz", r"no data set 'digitz'.*did you mean 'digits'"),
        ("kmnist:3.0.1", r"tfds build kmnist:3.0.1 --file_format=array_record --data_dir="),
    ],
)
def test_a_name_that_is_not_there_says_what_to_do(name, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        datasets.load(name, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_real_mnist_is_prepared_and_read_back_in_order(test_data, tmp_path):
    for path in test_data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    test = sources.load_all(datasets.load("mnist", tmp_path).test).arrays
    image_set = datasets.IMAGE_SETS["mnist"]
    read = files.reader(image_set, tmp_path, download=False)
    for index, (image, label) in enumerate(image_set.read(read, image_set)["test"]):
        assert test["label"][index] == label
        assert (test["image"][index] == image).all()
