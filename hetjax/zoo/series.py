"""Time series as arrays: windows of a past and the points after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def windows(
    series: Mapping[str, np.ndarray] | Sequence[np.ndarray], past: int, future: int
) -> dict[str, np.ndarray]:
    """Every window of each series, each one point later than the one before it.

    Args:
      series: one array of points each, by name or in a list.
      past: points that a model sees.
      future: points after them that it is to forecast.

    Returns:
      `{"past": f32[n, past], "future": f32[n, future]}`, series after series.

    Raises:
      ValueError: a series is too short for one window or has a point that is no finite number; the
        message names it. Or there are no series, or a window has no past or no future.

    Example:
      >>> found = windows([np.arange(4.0)], 2, 1)
      >>> found["past"].tolist(), found["future"].tolist()
      ([[0.0, 1.0], [1.0, 2.0]], [[2.0], [3.0]])
    """
    _check_sizes(past=past, future=future)
    cut = []
    for index, (name, given) in enumerate(_named(series)):
        points = _points(given, f"series {index}{name}")
        if len(points) < past + future:
            raise ValueError(
                f"series {index}{name} has {len(points)} points, and a window needs {past} + "
                f"{future}; leave it out, or take shorter windows"
            )
        cut.append(np.lib.stride_tricks.sliding_window_view(points, past + future))
    if not cut:
        raise ValueError("there are no series to cut windows from")
    whole = np.concatenate(cut)
    return {"past": whole[:, :past], "future": whole[:, past:]}


def ends(
    series: Mapping[str, np.ndarray], futures: Mapping[str, np.ndarray], past: int
) -> dict[str, np.ndarray]:
    """The last points of each series beside those that came afterwards.

    Args:
      series: the known points, by name.
      futures: the points to forecast, of the same names and all equally long.
      past: points that a model sees.

    Returns:
      `{"past": f32[n, past], "future": f32[n, horizon]}`.

    Raises:
      ValueError: a series is too short, has a point that is no finite number, or is in only one of
        the two; or futures differ in length.

    Example:
      >>> ends({"a": np.arange(4.0)}, {"a": np.arange(4.0, 6.0)}, 3)["past"].tolist()
      [[1.0, 2.0, 3.0]]
    """
    if other := sorted(series.keys() ^ futures.keys()):
        raise ValueError(f"series {other[0]!r} is in one of the two files alone")
    if not futures:
        raise ValueError("there are no series to tell")
    _check_sizes(past=past)
    pasts, later = [], []
    for index, name in enumerate(series):
        points = _points(series[name], f"series {index} ({name!r})")
        if len(points) < past:
            raise ValueError(
                f"series {index} ({name!r}) has {len(points)} points, and a forecast needs {past}"
            )
        pasts.append(points[-past:])
        later.append(_points(futures[name], f"the future of series {index} ({name!r})"))
        if len(later[-1]) != len(later[0]):
            raise ValueError(
                f"series {index} ({name!r}) goes on for {len(later[-1])} points, the first "
                f"for {len(later[0])}"
            )
    return {"past": np.stack(pasts), "future": np.stack(later)}


def _named(
    series: Mapping[str, np.ndarray] | Sequence[np.ndarray],
) -> list[tuple[str, np.ndarray]]:
    """(" ('name')" or "", points) of each series."""
    if isinstance(series, Mapping):
        return [(f" ({name!r})", points) for name, points in series.items()]
    return [("", points) for points in series]


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; give the number of points, 1 or more")


def _points(given: Any, name: str) -> np.ndarray:
    """The points as `f32[n]`; names the first that is no finite number."""
    try:
        points = np.asarray(given, np.float64)
    except (TypeError, ValueError):  # one of them is no number at all
        points = np.array([_number(point) for point in given])
    if points.ndim != 1:
        raise ValueError(f"{name} has the shape {list(points.shape)}; give one number a point")
    with np.errstate(over="ignore"):
        single = points.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(single))
    if wrong.size:
        raise ValueError(
            f"point {wrong[0]} of {name} is {given[wrong[0]]!r}, which is no finite number of "
            "single precision; leave the series out, or cut it there"
        )
    return single


def _number(point: Any) -> float:
    try:
        return float(point)
    except (TypeError, ValueError):
        return np.nan
