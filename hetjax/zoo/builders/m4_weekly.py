"""The weekly series of the M4 competition: 359 series of 80 to 2,597 points, and the 13 after them.

A line of a file is the series' name and its points, in quotation marks, with commas between them;
a shorter series has empty cells at its end.

References:
  S. Makridakis, E. Spiliotis, V. Assimakopoulos, The M4 Competition: 100,000 time series and 61
    forecasting methods, International Journal of Forecasting, 2020.
"""

import csv

import numpy as np

from hetjax.zoo import series
from hetjax.zoo.builders import files

FILES = {"train": "Weekly-train.csv", "test": "Weekly-test.csv"}


def parse(content: bytes, name: str) -> dict[str, np.ndarray]:
    """The points of each series, `f64[length]`, by its name.

    Raises:
      ValueError: a cell is no finite number or lies behind an empty one, or a series has no points
        or is there twice. The message names the series and the cell.
    """
    found: dict[str, np.ndarray] = {}
    for index, line in enumerate(_lines(content, name)):
        title, cells = (line[0], line[1:]) if line else ("", [])
        while cells and not cells[-1]:
            cells.pop()
        if not title or not cells or title in found:
            wrong = "is there twice" if title in found else "has no name or no points"
            raise ValueError(f"series {index} ({title!r}) of {name} {wrong}")
        points = np.array([_number(cell) for cell in cells])
        wrong_at = np.flatnonzero(~np.isfinite(points))
        if wrong_at.size:
            raise ValueError(
                f"point {wrong_at[0]} of series {index} ({title!r}) of {name} is "
                f"{cells[wrong_at[0]]!r}, expected a finite number; get the file again"
            )
        found[title] = points
    if not found:
        raise ValueError(f"{name} has no series")
    return found


def _lines(content: bytes, name: str) -> list[list[str]]:
    """The cells of each line but the first."""
    try:
        return list(csv.reader(files.lines(content, name)[1:]))
    except csv.Error as error:
        raise ValueError(f"{name} has no such lines: {error}; get it again") from error


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def open_m4_weekly(read_file: files.ReadFile, *, past: int = 20, future: int = 6) -> files.Arrays:
    """Windows of the training series, and the last points of each with those of the test file.

    Args:
      read_file: gives the contents of a file.
      past: points that a model sees.
      future: points that it forecasts at once.
    """
    points = {split: parse(read_file(name), name) for split, name in FILES.items()}
    try:
        test = series.ends(points["train"], points["test"], past)
        train = series.windows(points["train"], past, future)
    except ValueError as error:
        raise ValueError(f"data.past={past}, data.future={future}: {error}") from error
    horizon = test["future"].shape[1]
    if future > horizon:
        raise ValueError(
            f"data.future: got {future}; the series of the test file go on for {horizon} weeks, so "
            f"allowed is 1 to {horizon}"
        )
    return files.Arrays(
        train=train,
        evals={"test": test},
        kind="past",
        example_shape=(past,),
        num_classes=future,
        notes=(
            f"An example is a window of {past} weeks and the {future} after them, one of "
            f"{len(train['past']):,} of {len(points['train'])} series; num_train takes the first "
            f"ones. The test is the {future} weeks' "
            f"forecast continued on itself to {horizon} weeks, once a series; the "
            "naive forecast is the last known value.",
        ),
    )


M4_WEEKLY = files.ArraySet(
    name="m4_weekly",
    title="M4 weekly: 359 series, of which 13 weeks are to be told",
    homepage="https://github.com/Mcompetitions/M4-methods",
    citation=(
        "@article{makridakis2020m4, title = {The M4 Competition: 100,000 time series and 61 "
        "forecasting methods}, author = {Makridakis, Spyros and Spiliotis, Evangelos and "
        "Assimakopoulos, Vassilios}, journal = {International Journal of Forecasting}, year = "
        "{2020}}"
    ),
    files=(
        files.FileSpec(
            "Weekly-train.csv",
            4_015_067,
            "d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714",
        ),
        files.FileSpec(
            "Weekly-test.csv",
            44_247,
            "3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688",
        ),
    ),
    open=open_m4_weekly,
)
