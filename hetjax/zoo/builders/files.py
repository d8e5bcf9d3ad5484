"""Where the original files of a data set are, and whether they are the right ones.

An `ImageSet` or an `ArraySet` describes a data set. `FileSpec`s describe the files it needs, with
the size and the SHA-256 of its authors' files. These are as in TFDS's own table if it has them, and
were checked against real copies. Files are looked for in a few places under the data directory,
downloaded from the official addresses if they are nowhere, and refused if a byte differs.
"""

import dataclasses
import hashlib
import http.client
import inspect
import logging
import pathlib
import tarfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hetjax import whole

logger = logging.getLogger(__name__)

TIMEOUT_SECS = 30  # without a byte from the server
BLOCK_BYTES = 1 << 20
_GET_IT = (
    "If it is another data set's, give another directory (data.dir); "
    "else delete it and get it again"
)

Record = tuple[np.ndarray, int]
ReadFile = Callable[[str], bytes]


@dataclasses.dataclass(frozen=True)
class FileSpec:
    """An original file: its name, what it must contain, where it can be had.

    Attributes:
      name: file name, or path inside an archive.
      size_bytes: its size.
      sha256: its SHA-256, in hexadecimal.
      urls: addresses, tried in turn; empty if the file comes in an archive alone.
    """

    name: str
    size_bytes: int
    sha256: str
    urls: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginalSet:
    """A data set as its authors publish it.

    Attributes:
      name: what the user calls it.
      title: one line that says what it is.
      homepage: where its authors describe it.
      citation: BibTeX.
      files: the original files; empty if the package has them.
      archive: one file that holds all of `files`, if there is one.
    """

    name: str
    title: str
    homepage: str
    citation: str
    files: tuple[FileSpec, ...]
    archive: FileSpec | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet(OriginalSet):
    """A labelled set of images and how to read it.

    Attributes:
      version: of the prepared form; a new version is prepared beside an old one.
      image_shape: `(height, width, channels)`, uint8.
      num_classes: labels are 0..num_classes-1.
      read: `(files' contents by name, ImageSet) -> records by split`, in the original order.
    """

    version: str
    image_shape: tuple[int, int, int]
    num_classes: int
    read: "Callable[[ReadFile, ImageSet], Mapping[str, Iterator[Record]]]"


class Arrays(NamedTuple):
    """A data set in memory.

    Attributes:
      train: the training examples, a dict of arrays with a common leading axis.
      evals: the examples of each evaluated set, by its name, the main one first.
      kind: the field that a model takes, which says what an example is.
      example_shape: shape of that field in one example.
      num_classes: how many numbers a model gives: classes, words of a vocabulary, or points.
      notes: sentences that a report must say of the data.
    """

    train: Mapping[str, np.ndarray]
    evals: Mapping[str, Mapping[str, np.ndarray]]
    kind: str
    example_shape: tuple[int, ...]
    num_classes: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySet(OriginalSet):
    """A set of text, sentences or series that is made anew from its files whenever it is opened.

    Attributes:
      open: `(files' contents by name, **options) -> Arrays`. Its keyword arguments are the options
        of the set, which are fields `data.NAME` of a configuration.
    """

    open: Callable[..., Arrays]

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(inspect.signature(self.open).parameters)[1:]


def reader(image_set: OriginalSet, data_dir: pathlib.Path, *, download: bool = True) -> ReadFile:
    """Finds the original files and returns a function that reads one, checked.

    Looks in `data_dir/NAME`, `data_dir` and `data_dir/downloads/manual` for each file by itself,
    then for the archive. What is missing is downloaded to `data_dir/NAME`.

    Args:
      image_set: the data set.
      data_dir: the data directory.
      download: whether to try the network for what is missing.

    Returns:
      `read(name) -> bytes` for each name in `image_set.files`.

    Raises:
      ValueError: files are missing and cannot be downloaded (the message says what to put where),
        or a file has the wrong size or checksum. `read`, too, may raise the latter.
    """
    specs = {spec.name: spec for spec in image_set.files}
    found = {name: _find(name, image_set, data_dir) for name in specs}
    missing = [name for name, path in found.items() if path is None]

    def read(name: str) -> bytes:
        try:
            return checked_bytes(_present(found[name]), specs[name])
        except ValueError as error:
            raise ValueError(f"{error} ({_places(specs[name], image_set)})") from error

    if not missing:
        return read
    if image_set.archive is None:
        for name in missing:
            found[name] = _fetch_missing(specs[name], image_set, data_dir, missing, download)
        return read
    archive = _find(image_set.archive.name, image_set, data_dir)
    if archive is None:
        archive = _fetch_missing(image_set.archive, image_set, data_dir, missing, download)
    check_file(archive, image_set.archive)
    return lambda name: _archive_member(archive, specs[name])


def checked_bytes(path: pathlib.Path, spec: FileSpec) -> bytes:
    """Reads a file and checks it.

    Raises:
      ValueError: wrong size or checksum. The message names the file, what was found and what was
        expected.
    """
    try:
        _check_size(path, path.stat().st_size, spec)
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    _check_sha256(path, hashlib.sha256(content).hexdigest(), spec)
    return content


def check_file(path: pathlib.Path, spec: FileSpec) -> None:
    """As `checked_bytes`, for a file too large to keep in memory."""
    _check_size(path, path.stat().st_size, spec)
    with path.open("rb") as file:
        _check_sha256(path, hashlib.file_digest(file, "sha256").hexdigest(), spec)


def download_file(spec: FileSpec, target: pathlib.Path) -> None:
    """Downloads to `target.part`, checks, and renames. So `target` is whole or absent.

    Raises:
      ValueError: no address gave the right file. The message says what each gave instead.
    """
    failures = []
    target.parent.mkdir(parents=True, exist_ok=True)
    for url in spec.urls:
        logger.info(f"downloading {url} ({spec.size_bytes / 1e6:.1f} MB)")
        try:
            with whole.written(target) as part:
                with urllib.request.urlopen(url, timeout=TIMEOUT_SECS) as response:
                    _save(response, part, limit_bytes=spec.size_bytes + 1)
                check_file(part, spec)
            return
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
    raise ValueError("; ".join(failures) if failures else f"no address is known for {spec.name}")


def _save(response, part: pathlib.Path, *, limit_bytes: int) -> None:
    with part.open("wb") as file:
        while block := response.read(min(BLOCK_BYTES, limit_bytes - file.tell())):
            file.write(block)


def _fetch_missing(
    spec: FileSpec,
    image_set: OriginalSet,
    data_dir: pathlib.Path,
    missing: list[str],
    download: bool,
) -> pathlib.Path:
    target = data_dir / image_set.name / spec.name
    reason = "Downloading failed: downloading is off"
    if not spec.urls:
        reason = "hetjax does not download it"
    elif download:
        try:
            download_file(spec, target)
            return target
        except (ValueError, OSError) as error:
            reason = f"Downloading failed: {error}"
    wanted = ", ".join(missing)
    if image_set.archive is not None:
        wanted = f"{image_set.archive.name}, or unpacked {wanted},"
    raise ValueError(
        f"the data set {image_set.name} is missing: put {wanted} into "
        f"{data_dir / image_set.name} ({_places(spec, image_set)}), or set data.dir. {reason}"
    )


def _places(spec: FileSpec, image_set: OriginalSet) -> str:
    """Where a file comes from: the archive's address, or the folders that have single files."""
    archive = image_set.archive
    urls = archive.urls if archive else [url.removesuffix(spec.name) for url in spec.urls]
    return f"from {' or '.join(urls)}" if urls else f"see {image_set.homepage}"


def _find(name: str, image_set: OriginalSet, data_dir: pathlib.Path) -> pathlib.Path | None:
    bare = pathlib.PurePath(name).name
    for folder in (
        data_dir / image_set.name,
        data_dir,
        data_dir / "downloads" / "manual",
    ):
        inside = pathlib.PurePath(*pathlib.PurePath(name).parts[1:])  # of the first folder
        for candidate in (folder / name, folder / inside, folder / bare):
            if is_file(candidate):
                return candidate
    return None


def is_file(path: pathlib.Path) -> bool:
    """Whether there is such a file.

    Raises:
      ValueError: this process may not look into its directory.
    """
    try:
        return path.is_file()
    except OSError as error:
        raise ValueError(
            f"{path.parent} cannot be read: {error}; give another directory (data.dir)"
        ) from error


def _present(path: pathlib.Path | None) -> pathlib.Path:
    assert path is not None
    return path


def _archive_member(archive: pathlib.Path, spec: FileSpec) -> bytes:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(spec.name)
        assert file is not None
        content = file.read()
    path = archive / spec.name
    _check_size(path, len(content), spec)
    _check_sha256(path, hashlib.sha256(content).hexdigest(), spec)
    return content


def _check_size(path: pathlib.Path, size_bytes: int, spec: FileSpec) -> None:
    if size_bytes != spec.size_bytes:
        raise ValueError(
            f"{path} has {size_bytes:,} bytes, expected {spec.size_bytes:,}: it is not the "
            f"original file or not the whole of it. {_GET_IT}"
        )


def _check_sha256(path: pathlib.Path, sha256: str, spec: FileSpec) -> None:
    if sha256 != spec.sha256:
        raise ValueError(
            f"{path} has SHA-256 {sha256}, expected {spec.sha256}: its contents are not the "
            f"original's. {_GET_IT}"
        )


def lines(content: bytes, name: str) -> list[str]:
    """The lines of a text file in UTF-8, without their ends.

    Raises:
      ValueError: it is no such file. The message names the byte.
    """
    try:
        return content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not text in UTF-8 (byte {error.start}): the file is damaged, get it again"
        ) from error


def check_labels(labels: np.ndarray, name: str, *, num_classes: int) -> None:
    """Checks the labels of a file, `u8[n]`.

    Raises:
      ValueError: a label is outside 0..num_classes-1. The message names the first such record.
    """
    wrong = np.flatnonzero(labels >= num_classes)
    if wrong.size:
        raise ValueError(
            f"record {wrong[0]} of {name} has label {labels[wrong[0]]}, expected "
            f"0..{num_classes - 1}"
        )
