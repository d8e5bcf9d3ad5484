"""Windows of time series, and the ends that are to be continued."""

import numpy as np
import pytest

from hetjax.zoo import series

POINTS = {"a": np.arange(5.0), "b": 10 + np.arange(4.0)}


def test_windows_are_all_of_each_series_and_span_no_two():
    found = series.windows(POINTS, 2, 1)
    rows = np.concatenate([found["past"], found["future"]], axis=1)
    assert rows.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [10, 11, 12], [11, 12, 13]]
    assert rows.dtype == np.float32


def test_ends_are_the_last_points_beside_those_that_came_afterwards():
    found = series.ends(POINTS, {"b": np.array([1.0, 2.0]), "a": np.array([3.0, 4.0])}, 3)
    assert found["past"].tolist() == [[2, 3, 4], [11, 12, 13]]
    assert found["future"].tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (series.windows, (POINTS, 3, 2), r"1 \('b'\) has 4 points, and a window needs 3 \+ 2"),
        (series.windows, ([np.arange(2.0)], 2, 1), r"0 has 2 points, and a window needs 2 \+ 1"),
        (series.ends, (POINTS, POINTS, 5), r"1 \('b'\) has 4 points, and a forecast needs 5"),
        (series.windows, ([], 2, 1), "there are no series"),
        (series.windows, ({"a": np.array([1.0, np.nan])}, 1, 1), r"1 of series 0 \('a'\) is .*nan"),
        (series.windows, ([np.ones((3, 2))], 2, 1), r"series 0 has the shape \[3, 2\]"),
        (series.windows, (POINTS, -1, 3), "past is -1; .* 1 or more"),
    ],
)
def test_what_is_no_series_or_too_short_is_told(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(*given)
