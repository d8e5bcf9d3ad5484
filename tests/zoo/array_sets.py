"""Small text, sentences and series in the original files' form, written to a directory."""

import dataclasses
import hashlib

import numpy as np

from hetjax.zoo import datasets
from hetjax.zoo.builders import files

WORDS = ["the", "good", "bad", "film", "plot", "is", "was", "very", "not", "<unk>"]


def contents(name):
    """The files of a small set, by name, as bytes."""
    rng = np.random.default_rng(0)
    if name == "wikitext2":
        return {
            f"wiki.{split}.tokens": _lines(" ".join(rng.choice(WORDS, 8)) for _ in range(count))
            for split, count in (("train", 60), ("valid", 10), ("test", 10))
        }
    if name == "m4_weekly":
        walks = {  # waves, so that there is something to learn
            f"W{i}": 50 + 9 * np.sin(0.7 * np.arange(60 + i) + i) + rng.normal(size=60 + i)
            for i in range(6)
        }
        head = ",".join(f'"V{i}"' for i in range(1, 67))
        train = [head, *(_series(k, walk[:-13], 65) for k, walk in walks.items())]
        test = [",".join(f'"V{i}"' for i in range(1, 15))]
        test += [_series(k, walk[-13:], 13) for k, walk in walks.items()]
        return {"Weekly-train.csv": _lines(train), "Weekly-test.csv": _lines(test)}
    return {
        f"glue/{_FOLDERS[name]}/{file}.tsv": _lines(_rows(name, count, rng))
        for file, count in (("train", 48), ("dev", 16))
    }


_FOLDERS = {"sst2": "SST-2", "cola": "CoLA", "rte": "RTE"}


def _rows(name, count, rng):
    if name == "sst2":
        yield "sentence\tlabel"
    if name == "rte":
        yield "index\tsentence1\tsentence2\tlabel"
    for index in range(count):
        label = int(rng.integers(2))
        words = [*rng.choice([w for w in WORDS if w not in ("good", "bad")], 4)]
        first = " ".join(["good" if label else "bad", *words])
        if name == "sst2":
            yield f"{first}\t{label}"
        elif name == "cola":
            yield f"gj04\t{label}\t\t{first}"
        else:
            yield f"{index}\t{first}\tthe plot\t{('entailment', 'not_entailment')[label]}"


def _series(name, points, width):
    cells = [f'"{point:.3f}"' for point in points]
    return ",".join([f'"{name}"', *cells, *[""] * (width - len(cells))])


def _lines(lines):
    return ("\n".join(lines) + "\n").encode()


def write(folder, name, monkeypatch, changes=None):
    """Writes the files of a small set below `folder`, and has `datasets` know it for the real one.

    `changes` are other contents of some files.
    """
    found = {**contents(name), **(changes or {})}
    specs = []
    for file, content in found.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        specs.append(files.FileSpec(file, len(content), hashlib.sha256(content).hexdigest()))
    small = dataclasses.replace(datasets.ARRAY_SETS[name], files=tuple(specs))
    monkeypatch.setitem(datasets.ARRAY_SETS, name, small)
    return folder
