"""Three tasks of GLUE as features of sentences with labels: SST-2, CoLA and RTE.

There is no pretrained encoder here. The features come from the words alone: a number for each
different word, or coordinates along singular vectors of the training sentences. The labels of the
test files are not public, so the development files are evaluated.

References:
  A. Wang, A. Singh, J. Michael, F. Hill, O. Levy, S. R. Bowman, GLUE: a multi-task benchmark and
    analysis platform for natural language understanding, 2019, arXiv 1804.07461.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetjax.zoo import text
from hetjax.zoo.builders import files

FEATURES = ("hashed", "svd")
NUM_FEATURES = {"hashed": 2**16, "svd": 768}
_STAND_IN = (
    "The head stands for the one that is trained on a frozen encoder: no pretrained encoder is "
    "used, the features are made of the words of a sentence alone."
)
_DEV = "What is called val is the development file: the labels of the test file are not public."


class Columns(NamedTuple):
    """Which column of a file has what, counted from 0."""

    sentences: tuple[int, ...]
    label: int
    num_columns: int
    header: bool
    labels: Mapping[str, int]


_BINARY = {"0": 0, "1": 1}
COLUMNS = {
    "SST-2": Columns((0,), 1, 2, True, _BINARY),
    "CoLA": Columns((3,), 1, 4, False, _BINARY),
    "RTE": Columns((1, 2), 3, 4, True, {"entailment": 0, "not_entailment": 1}),
}


def parse(content: bytes, name: str, columns: Columns) -> tuple[list[list[str]], np.ndarray]:
    """Reads one file with labels.

    Args:
      content: lines of columns with tabs between them.
      name: what to call it in errors.
      columns: which column has what.

    Returns:
      The words of each example, those of a second sentence marked as such, and labels `i32[n]`.

    Raises:
      ValueError: a line has other columns, a label is none, or a sentence has no words. The message
        names the example; the first one after a header is 0.
    """
    sentences: list[list[str]] = []
    labels: list[int] = []
    lines = files.lines(content, name)[columns.header :]
    for index, line in enumerate(lines):
        cells = line.split("\t")
        if len(cells) != columns.num_columns:
            raise ValueError(
                f"example {index} of {name} has {len(cells)} columns, expected "
                f"{columns.num_columns}: the file is damaged, get it again"
            )
        label = cells[columns.label]
        if label not in columns.labels:
            raise ValueError(
                f"example {index} of {name} has the label {label!r}, expected one of "
                f"{', '.join(columns.labels)}"
            )
        found = []
        for place, column in enumerate(columns.sentences):
            words = text.split_sentence(cells[column])
            if not words:
                raise ValueError(f"example {index} of {name}: sentence {place} has no words")
            found += [f"{place}:{word}" for word in words] if place else words
        sentences.append(found)
        labels.append(columns.labels[label])
    if not labels:
        raise ValueError(f"{name} has no examples")
    return sentences, np.asarray(labels, np.int32)


def open_task(
    read_file: files.ReadFile,
    *,
    features: str = "hashed",
    num_features: int = 0,
    task: str,
    notes: Sequence[str] = (),
) -> files.Arrays:
    """Features and labels of the training and the development file.

    Args:
      read_file: gives the contents of a file.
      features: "hashed", a number for each different word, or "svd".
      num_features: how many numbers or coordinates; 0: 65,536 or 768.
      task: the name of its folder.
      notes: more sentences for the report.

    Raises:
      ValueError: there are no such features, or `parse` raises it.
    """
    if features not in FEATURES:
        raise ValueError(f"data.features: got {features!r}, must be one of {', '.join(FEATURES)}.")
    size = num_features or NUM_FEATURES[features]
    named = {split: f"{task}/{file}.tsv" for split, file in (("train", "train"), ("val", "dev"))}
    found = {
        split: parse(read_file(f"glue/{name}"), name, COLUMNS[task])
        for split, name in named.items()
    }
    make: Callable[..., np.ndarray]
    if features == "hashed":
        make, kind = functools.partial(text.hashed, size=size), "words"
        how = f"Each different word of a sentence is one of {size:,} numbers, by its CRC-32."
    else:
        try:
            make, kind = text.SingularFeatures(found["train"][0], size), "features"
        except ValueError as error:
            raise ValueError(f"data.num_features: {error}") from error
        how = (
            f"The {size} features are found by a singular value decomposition of the training "
            "sentences' weighted words."
        )
    cut = {
        split: {kind: make(sentences, name=named[split]), "label": labels}
        for split, (sentences, labels) in found.items()
    }
    return files.Arrays(
        train=cut.pop("train"),
        evals=cut,
        kind=kind,
        example_shape=(size,),
        num_classes=2,
        notes=(_STAND_IN, how, _DEV, *notes),
    )


def _task(
    name: str, folder: str, title: str, specs: Sequence[tuple[str, int, str]], *notes: str
) -> files.ArraySet:
    """One of the tasks; `specs` are name, bytes and SHA-256 of each file that has labels."""

    def open(
        read_file: files.ReadFile, *, features: str = "hashed", num_features: int = 0
    ) -> files.Arrays:
        return open_task(
            read_file, features=features, num_features=num_features, task=folder, notes=notes
        )

    return files.ArraySet(
        name=name,
        title=title,
        homepage="https://gluebenchmark.com/tasks",
        citation=(
            "@inproceedings{wang2019glue, title = {GLUE: A Multi-Task Benchmark and Analysis "
            "Platform for Natural Language Understanding}, author = {Wang, Alex and Singh, "
            "Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.}, "
            "booktitle = {ICLR}, year = {2019}}"
        ),
        files=tuple(
            files.FileSpec(f"glue/{folder}/{file}", size_bytes, sha256)
            for file, size_bytes, sha256 in specs
        ),
        open=open,
    )


SST2 = _task(
    "sst2",
    "SST-2",
    "SST-2 of GLUE: 67,349 phrases of film reviews, 872 to validate, positive or negative",
    (
        (
            "train.tsv",
            3_806_081,
            "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        ),
        ("dev.tsv", 94_931, "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0"),
    ),
)
COLA = _task(
    "cola",
    "CoLA",
    "CoLA of GLUE: 8,551 sentences, 1,043 to validate, acceptable or not",
    (
        ("train.tsv", 428_590, "230417e3bd1836f55617d944d4af4b532b60c00a5e8f1bd194486b6b6f172ef8"),
        ("dev.tsv", 53_717, "8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd"),
    ),
)
RTE = _task(
    "rte",
    "RTE",
    "RTE of GLUE: 2,490 pairs of sentences, 277 to validate, does one follow from the other",
    (
        ("train.tsv", 846_226, "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c"),
        ("dev.tsv", 90_343, "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb"),
    ),
    "With such features RTE is at chance: only the training loss says something here.",
)
