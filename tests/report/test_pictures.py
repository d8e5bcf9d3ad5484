"""The pictures: gaps, absent workers, and no trace of the caller's settings."""

import itertools

import matplotlib
import pytest
from matplotlib import patches

from hetjax.report import canvas, losses, over_rounds, sections, timeline
from tests.report import runs


@pytest.mark.parametrize("bad", [float("nan"), None, float("inf")])
def test_losses_that_are_not_numbers_leave_gaps(bad):
    some = runs.make_history(12, 2, loss=lambda i: bad if i % 2 else 1.0)
    assert "no finite loss" not in losses.draw_losses(some, {}, width=900)
    none = runs.make_history(12, 2, loss=lambda i: bad, eval=lambda i: None)
    assert "no finite loss" in losses.draw_losses(none, {}, width=900)


def test_a_worker_that_is_absent_is_named_so():
    history = runs.make_history(12, 3, present=lambda i: [True, i < 6, True])
    picture = over_rounds.draw_quotas(history, width=900)
    assert "worker 1: absent" in picture
    assert "worker 2: absent" not in picture


@pytest.mark.parametrize("place", [0.0, 1.0])
def test_names_of_many_equal_lines_stay_in_the_picture(place):
    figure = canvas.make_figure(300, 240)
    axes = canvas.add_axes(figure, 20, 14, 200, 196)
    canvas.end_labels(axes, [(place, f"worker {j}", canvas.INK) for j in range(8)])
    spots = sorted({text.xyann[1] for text in axes.texts})
    assert len(spots) == 8
    assert min(b - a for a, b in itertools.pairwise(spots)) >= 14.8
    assert spots[0] >= 0
    assert spots[-1] <= 200


def test_the_callers_matplotlib_settings_neither_matter_nor_change(pages):
    history, width = runs.make_history(7, 1, rounds_per_epoch=7), sections.SCREENS["narrow"]
    with matplotlib.rc_context({"axes.labelpad": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        drawn = [
            timeline.draw_timeline(history, width=width),
            over_rounds.draw_quotas(history, width=width),
            over_rounds.draw_times(history, {}, width=width),
            losses.draw_losses(history, {}, width=width),
            losses.draw_accuracies(history, {}, width=width),
        ]
        assert dict(matplotlib.rcParams) == before
    assert all(picture in pages["one worker"] for picture in drawn)


def test_a_bar_begins_when_its_process_has_updated():
    host = [0.01, 0.05]
    told = runs.make_history(6, 2, compute_secs=lambda i: [0.10, 0.08], host_secs=lambda i: host)
    layout = timeline._lay_out(told[:3])
    assert layout.local == pytest.approx([0.13] * 3)
    figure = canvas.make_figure(900, 100)
    axes = canvas.add_axes(figure, 10, 10, 800, 80)
    axes.set_xlim(0, layout.end())
    timeline._bars(axes, told[:1], timeline._lay_out(told[:1]), factor=1.0, row=30.0)
    boxes = [artist for artist in axes.get_children() if isinstance(artist, patches.PathPatch)]
    first, second, waiting = (box.get_path().get_extents().intervalx for box in boxes)
    assert first == pytest.approx([0.01, 0.11])
    assert second == pytest.approx([0.05, 0.13])
    assert waiting == pytest.approx([0.11, 0.13])
    assert "In the gap before" in sections._timeline({}, told)
    assert "In the gap before" not in sections._timeline({}, runs.make_history(6, 2))
