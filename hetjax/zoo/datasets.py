"""Data sets by name: those that hetjax reads itself, and any that TFDS has prepared.

Images are prepared once, in TFDS's form. Text, sentences and series are small. They are made from
their original files whenever they are opened, with options that a configuration gives.

TFDS is imported when a data set is opened, never TensorFlow. A data set that is not one of
`BUILTIN` must have been prepared by TFDS, in the array_record format, beforehand.
"""

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from hetjax import extras
from hetjax.data import sources
from hetjax.zoo.builders import cifar10, digits, files, glue, m4_weekly, mnist, wikitext2

IMAGE_SETS: dict[str, files.ImageSet] = {
    image_set.name: image_set
    for image_set in (digits.DIGITS, cifar10.CIFAR10, mnist.FASHION_MNIST, mnist.MNIST)
}
ARRAY_SETS: dict[str, files.ArraySet] = {
    array_set.name: array_set
    for array_set in (
        wikitext2.WIKITEXT2,
        glue.SST2,
        glue.COLA,
        glue.RTE,
        m4_weekly.M4_WEEKLY,
    )
}
ORIGINAL_SETS: dict[str, files.OriginalSet] = {**IMAGE_SETS, **ARRAY_SETS}
BUILTIN = tuple(ORIGINAL_SETS)
DATA_DIR_VARIABLE = "HETJAX_DATA_DIR"
TFDS = ("tensorflow_datasets", "array_record", "importlib_resources")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An opened data set.

    Attributes:
      train: source of the training examples.
      evals: source of the examples of each evaluated set, by its name, the main one first.
      num_classes: how many numbers a model gives. Labels, or words, are 0..num_classes-1. For
        series it is how many points are forecast at once. None if the set has no class labels.
      example_shape: shape of the field `kind` in an example; None if there is no such field.
      name: as it was asked for.
      kind: the field that a model takes: "image", "features", "words", "tokens" or "past".
      notes: sentences that a report must say of the data.
    """

    train: sources.Source
    evals: Mapping[str, sources.Source]
    num_classes: int | None
    example_shape: tuple[int, ...] | None
    name: str
    kind: str = "image"
    notes: tuple[str, ...] = ()

    @property
    def test(self) -> sources.Source:
        """The test set, or what stands for it if there is none."""
        return self.evals.get("test") or next(iter(self.evals.values()))


def default_data_dir() -> pathlib.Path:
    """`$HETJAX_DATA_DIR`, or `~/.cache/hetjax`."""
    return pathlib.Path(
        os.environ.get(DATA_DIR_VARIABLE) or pathlib.Path("~/.cache/hetjax")
    ).expanduser()


def load(name: str, data_dir: str | os.PathLike | None = None, **options: Any) -> Dataset:
    """Opens a data set; first prepares it if it is one of hetjax's own and not yet prepared.

    Args:
      name: one of `BUILTIN`, or a TFDS data set prepared under `data_dir` as TFDS names it,
        `name`, `name/config` or `name/config:version`. An item of hetjax's own image sets is
        `{"image": u8[H, W, C], "label": int}`, in the order of the original files. Those of the
        other own sets are dicts of arrays with a field `kind`.
      data_dir: where original and prepared data lie; None: `default_data_dir()`.
      **options: of the set, as `options_of` names them; an image set has none.

    Raises:
      ValueError: unknown name or option, or the data are missing, wrong or corrupt, or not in a
        format with random access. The message says what to put where, or which command prepares
        them.
    """
    root = pathlib.Path(data_dir).expanduser() if data_dir else default_data_dir()
    if unknown := options.keys() - set(options_of(name)):
        raise ValueError(
            f"data set {name}: there is no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(options_of(name)) or 'none'}"
        )
    if name in ARRAY_SETS:
        return _open_arrays(ARRAY_SETS[name], root, options)
    if name in IMAGE_SETS:
        extras.require(*TFDS)
        from hetjax.zoo.builders import prepared

        image_set = IMAGE_SETS[name]
        builder = prepared.prepare(image_set, root)
        return _open(builder, name, image_set.num_classes, image_set.image_shape)
    builder = _tfds_builder(name, root)
    features = dict(getattr(builder.info.features, "items", dict)())
    shape = getattr(features.get("image"), "shape", None)
    return _open(builder, name, getattr(features.get("label"), "num_classes", None), shape)


def options_of(name: str) -> tuple[str, ...]:
    """The options of a data set: `load`'s keyword arguments, and fields `data.NAME`."""
    return ARRAY_SETS[name].options if name in ARRAY_SETS else ()


def nearest(name: str) -> str:
    """A clause that proposes the builtin name that was meant, or an empty string."""
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), BUILTIN, n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _open_arrays(
    array_set: files.ArraySet, data_dir: pathlib.Path, options: Mapping[str, Any]
) -> Dataset:
    found = array_set.open(files.reader(array_set, data_dir), **options)
    return Dataset(
        sources.ArraySource(found.train, notes=found.notes),
        {name: sources.ArraySource(arrays) for name, arrays in found.evals.items()},
        found.num_classes,
        found.example_shape,
        array_set.name,
        found.kind,
        found.notes,
    )


def _open(
    builder: Any, name: str, num_classes: int | None, example_shape: tuple[int, ...] | None
) -> Dataset:
    splits = builder.info.splits
    test = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits or test is None:
        raise ValueError(
            f"data set {name} has the splits {sorted(splits)}; hetjax needs 'train' and 'test' "
            "(or 'validation')"
        )
    try:
        train_source, test_source = builder.as_data_source(["train", test])
    except NotImplementedError as error:
        raise ValueError(
            f"data set {name} in {builder.data_dir} is {_file_format(builder)}, not random access: "
            f"tfds build {name} --file_format=array_record --data_dir=DIR"
        ) from error
    # Opening is lazy: without this a lost file would be found at some record, hours later.
    for split in ("train", test):
        for path in (pathlib.Path(part.filename) for part in splits[split].file_instructions):
            if not path.is_file():
                raise ValueError(
                    f"data set {name} in {builder.data_dir} is damaged: {path.name} is "
                    "missing; delete that directory and prepare it again"
                )
    return Dataset(train_source, {"test": test_source}, num_classes, example_shape, name)


def _tfds_builder(name: str, data_dir: pathlib.Path) -> Any:
    extras.require(*TFDS)
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=str(data_dir))
    except Exception as error:  # not found, a bad name, a builder whose own imports are missing
        raise _missing(name, data_dir, f"{type(error).__name__}: {_first_line(error)}") from error
    # builder.is_prepared() says the same, and logs a warning
    if not files.is_file(pathlib.Path(builder.data_dir) / "dataset_info.json"):
        raise _missing(name, data_dir, "TFDS knows it, and it is not prepared there")
    return builder


def _missing(name: str, data_dir: pathlib.Path, reason: str) -> ValueError:
    plain = name.partition(":")[0].partition("/")[0]
    return ValueError(
        f"no data set {name!r} under {data_dir}{nearest(name)}; hetjax prepares "
        f"{', '.join(BUILTIN)} itself, any other must be a TFDS data set prepared in "
        f"{data_dir / plain}, for example where TensorFlow is installed by "
        f"tfds build {name} --file_format=array_record --data_dir={data_dir} ({reason})"
    )


def _file_format(builder: Any) -> str:
    file_format = builder.info.file_format
    return file_format.value if file_format else "unknown"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
