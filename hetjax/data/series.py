"""Time series as arrays: windows of a past and the points after it."""

from collections.abc import Mapping, Sequence

import numpy as np


def windows(
    series: Mapping[str, np.ndarray] | Sequence[np.ndarray], past: int, future: int
) -> dict[str, np.ndarray]:
    """Every window of each series, from its first point on, the next one a point later.

    Args:
      series: one array of points each, by name or in a list.
      past: points that a model sees.
      future: points after them that it is to tell.

    Returns:
      `{"past": f32[n, past], "future": f32[n, future]}`, series after series.

    Raises:
      ValueError: a series is too short for one window or has a point that is not finite, and
        names it; or there are no series.

    Example:
      >>> found = windows([np.arange(4.0)], 2, 1)
      >>> found["past"].tolist(), found["future"].tolist()
      ([[0.0, 1.0], [1.0, 2.0]], [[2.0], [3.0]])
    """
    cut = []
    for index, (name, points) in enumerate(_named(series)):
        if len(points) < past + future:
            raise ValueError(
                f"series {index}{name} has {len(points)} points, and a window needs {past} + "
                f"{future}; leave it out, or take shorter windows"
            )
        wrong = np.flatnonzero(~np.isfinite(points))
        if wrong.size:
            raise ValueError(
                f"point {wrong[0]} of series {index}{name} is {points[wrong[0]]}; leave the series "
                "out, or cut it there"
            )
        cut.append(np.lib.stride_tricks.sliding_window_view(points, past + future))
    if not cut:
        raise ValueError("there are no series to cut windows from")
    whole = np.concatenate(cut).astype(np.float32)
    return {"past": whole[:, :past], "future": whole[:, past:]}


def ends(
    series: Mapping[str, np.ndarray], futures: Mapping[str, np.ndarray], past: int
) -> dict[str, np.ndarray]:
    """The last points of each series beside those that came afterwards.

    Args:
      series: the points that are known, by name.
      futures: those that are to be told, of the same names and all equally long.
      past: points that a model sees.

    Returns:
      `{"past": f32[n, past], "future": f32[n, horizon]}`.

    Raises:
      ValueError: a series is too short or in one of the two alone, or futures differ in length.

    Example:
      >>> ends({"a": np.arange(4.0)}, {"a": np.arange(4.0, 6.0)}, 3)["past"].tolist()
      [[1.0, 2.0, 3.0]]
    """
    if other := sorted(series.keys() ^ futures.keys()):
        raise ValueError(f"series {other[0]!r} is in one of the two files alone")
    if not futures:
        raise ValueError("there are no series to tell")
    horizon = len(next(iter(futures.values())))
    for index, (name, points) in enumerate(series.items()):
        if len(points) < past:
            raise ValueError(
                f"series {index} ({name!r}) has {len(points)} points, and a forecast needs {past}"
            )
        if len(futures[name]) != horizon:
            raise ValueError(
                f"series {index} ({name!r}) goes on for {len(futures[name])} points, the first "
                f"for {horizon}"
            )
    return {
        "past": np.stack([points[-past:] for points in series.values()]).astype(np.float32),
        "future": np.stack([futures[name] for name in series]).astype(np.float32),
    }


def _named(
    series: Mapping[str, np.ndarray] | Sequence[np.ndarray],
) -> list[tuple[str, np.ndarray]]:
    """(" ('name')" or "", points) of each."""
    if isinstance(series, Mapping):
        return [(f" ({name!r})", points) for name, points in series.items()]
    return [("", points) for points in series]
