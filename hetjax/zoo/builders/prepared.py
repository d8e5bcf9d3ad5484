"""Writes an `ImageSet` as a TFDS array_record data set, without TensorFlow.

The prepared set lies in `DATA_DIR/hetjax_NAME/VERSION` and is an ordinary TFDS data set, which
`tfds.data_source("hetjax_NAME", data_dir=DATA_DIR)` reads, too. The prefix keeps it apart from
TFDS's own of that name. Records keep the order of the original files (TFDS shuffles by a hash
of the key unless told otherwise). Images are stored as raw bytes: with TFDS's default encoding,
a list of integers, CIFAR-10 takes five times as long to write and twice as long to read.

A preparation is written to a directory of its own and renamed. So an interrupted one leaves nothing
that could be taken for a data set. Processes that want the same set wait for the first.
"""

import contextlib
import logging
import pathlib
import shutil
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from hetjax.zoo.builders import files

logger = logging.getLogger(__name__)

PREFIX = "hetjax_"


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does nothing: TFDS would ask Google's bucket, and leave an empty temporary directory."""


class _ImageBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """TFDS's view of one `ImageSet`; subclassed with its `name` and `VERSION`."""

    VERSION = tfds.core.Version("0.0.0")
    image_set: files.ImageSet
    root: pathlib.Path
    read_file: files.ReadFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # its class has no place in a module
        return _builder, (self.image_set, self.root)

    def _info(self) -> tfds.core.DatasetInfo:
        image_set = self.image_set
        return _Info(
            builder=self,
            description=image_set.title,
            homepage=image_set.homepage,
            citation=image_set.citation,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(
                        shape=image_set.image_shape,
                        dtype=np.uint8,
                        encoding=tfds.features.Encoding.BYTES,
                    ),
                    "label": tfds.features.Scalar(dtype=np.int32),
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        assert self.read_file is not None
        splits = self.image_set.read(self.read_file, self.image_set)
        return {split: self._generate_examples(records) for split, records in splits.items()}

    def _generate_examples(self, records: Iterator[files.Record]) -> Iterator:
        for index, (image, label) in enumerate(records):
            yield index, {"image": image, "label": np.int32(label)}

    def _log_download_bytes(self) -> None:
        """Does nothing: `prepare` says in one line what it does."""

    _log_download_done = _log_download_bytes


def prepare(
    image_set: files.ImageSet, data_dir: pathlib.Path, *, download: bool = True
) -> tfds.core.DatasetBuilder:
    """Prepares a data set, unless it is prepared.

    Args:
      image_set: the data set.
      data_dir: where the original files are looked for and the prepared set is written.
      download: whether missing files may be fetched from the network.

    Returns:
      A TFDS builder whose data set is prepared.

    Raises:
      ValueError: original files missing, wrong or corrupt, or `data_dir` cannot be written.
    """
    builder = _builder(image_set, data_dir)
    if _is_prepared(builder):
        return builder
    folder = pathlib.Path(builder.data_dir).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder):
            builder = _builder(image_set, data_dir)
            if not _is_prepared(builder):
                _write(builder, image_set, data_dir, download=download)
    except OSError as error:
        raise ValueError(
            f"cannot prepare {image_set.name} under {data_dir}: {error}; give a directory that "
            "can be written and has room as data_dir (or set HETJAX_DATA_DIR)"
        ) from error
    return builder


def _builder(image_set: files.ImageSet, data_dir: pathlib.Path) -> Any:
    members = {
        "name": PREFIX + image_set.name,
        "VERSION": tfds.core.Version(image_set.version),
        "image_set": image_set,
        "root": data_dir,
        "__module__": __name__,
    }
    cls: Any = types.new_class(
        "Builder",
        (_ImageBuilder,),
        {"skip_registration": True},
        lambda space: space.update(members),
    )
    return cls(data_dir=str(data_dir))


def _is_prepared(builder: Any) -> bool:
    # builder.is_prepared() logs a warning if the answer is no
    return files.is_file(pathlib.Path(builder.data_dir) / "dataset_info.json")


def _write(
    builder: Any, image_set: files.ImageSet, data_dir: pathlib.Path, *, download: bool
) -> None:
    builder.read_file = files.reader(image_set, data_dir, download=download)
    target = pathlib.Path(builder.data_dir)
    for remains in (*target.parent.glob("incomplete.*"), target):  # TFDS would reuse `target`
        shutil.rmtree(remains, ignore_errors=True)
    logger.info(f"preparing {image_set.name} in {target}")
    with tempfile.TemporaryDirectory() as downloads, _no_progress_bars():
        builder.download_and_prepare(
            file_format="array_record",
            download_dir=downloads,
            download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from tensorflow_datasets.core.utils import tqdm_utils

    before = tqdm_utils._active
    tfds.display_progress_bar(False)
    try:
        yield
    finally:
        tfds.display_progress_bar(before)


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Holds a lock among processes, if the system has one."""
    try:
        import fcntl
    except ImportError:  # Windows: two preparations at once cost time; the rename keeps one
        yield
        return
    with (folder / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
