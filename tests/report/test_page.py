"""The page: one file that loads nothing, small, and no input breaks it."""

import re

from hetjax.report import canvas
from tests.launcher import launches
from tests.report import runs


def test_the_page_loads_nothing_and_runs_nothing(pages):
    for page in pages.values():
        assert "http" not in page
        assert "<script" not in page
        assert "@import" not in page
        loads = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page)
        assert loads
        assert all((a or b).startswith(("#", "data:image/png;base64,")) for a, b in loads)


def test_every_reference_inside_the_page_has_exactly_one_target(pages):
    for page in pages.values():
        targets = re.findall(r'\bid="([^"]*)"', page)
        wanted = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
        assert {a or b for a, b in wanted} <= set(targets)
        assert len(targets) == len(set(targets))


def test_no_stand_in_colour_is_left_in_the_page(pages):
    for page in pages.values():
        assert not [colour for colour in canvas.VARIABLES if colour in page]
    used = set(re.findall(r"var\(--([\w-]+)\)", pages["eight workers"]))
    defined = set(re.findall(r"--([\w-]+):", pages["eight workers"]))
    assert {"ink", "accent", "w0", "w7", "on-w0"} <= used <= defined


def test_one_and_many_workers_are_drawn(pages):
    assert "1 worker<" in pages["one worker"]
    assert "64 workers<" in pages["many workers"]
    for name in ("one worker", "eight workers", "many workers"):
        assert pages[name].count("<svg") == 10  # five pictures, each for wide and narrow screens
    heat_maps = {name for name, page in pages.items() if "data:image/png" in page}
    assert heat_maps == {"one round", "many workers", "gate"}  # what a round finished is a map


def test_a_run_without_rounds_says_so(tmp_path):
    page = runs.write(tmp_path, config={}, summary={})
    assert "No round was finished" in page
    assert "<svg" not in page


def test_strings_are_escaped(tmp_path):
    bad = "</pre><script>alert('&')</script>"
    history = [{"loss": 1.0, "eval": {f"{bad}loss": 1.0, f"{bad}accuracy": 0.5}}]
    config = {"data": {"name": bad}, bad: bad}
    summary = runs.SUMMARY | {"device_kind": bad}
    page = runs.write(tmp_path, config=config, summary=summary, history=history)
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in page


def test_rounds_without_a_finite_loss_and_skipped_examples_are_counted(tmp_path):
    history = [{"loss": None if i % 2 else 1.0, "skipped_examples": 8 * (i < 4)} for i in range(6)]
    page = runs.write(tmp_path, history=history)
    assert "3 of 6 rounds have no finite training loss" in page
    assert "32 examples were skipped" in page


def test_metrics_of_training_are_drawn_whatever_they_are_called(tmp_path):
    names = ["accuracy", "<script>", "$x", *(f"m{i}" for i in range(5))]
    history = runs.make_history(20, 2)
    for i, line in enumerate(history):
        line["metrics"] = dict.fromkeys(names, None if i == 3 else 0.1 * i)
    page = runs.write(tmp_path, history=history)
    assert "<script" not in page
    drawn = runs.section(page, "Metrics")
    assert "The first 6 of 7." in drawn  # accuracy has a picture of its own
    assert drawn.count("<svg") == 2
    assert "training, each round" in runs.section(page, "Accuracy")
    without = [{k: v for k, v in line.items() if k != "eval"} for line in history]
    drawn = runs.section(runs.write(tmp_path, history=without), "Metrics")
    assert "The first 6 of 8." in drawn
    assert ">accuracy<" in drawn
    assert not runs.section(runs.write(tmp_path, history=runs.make_history(4, 2)), "Metrics")


def test_a_long_run_stays_small(tmp_path):
    optimum = {"optimal_round_secs": lambda i: 0.04 + 0.001 * (i % 2)}
    history = runs.make_history(6_000, 4, rounds_per_epoch=5, **optimum)
    page = runs.write(tmp_path, history=history)
    assert len(page) < 1_000_000
    assert "… 5,976 rounds …" in page


def test_reports_need_neither_pyplot_nor_jax():
    code = """
import sys
from hetjax import report
assert "matplotlib" not in sys.modules
history = [{"loss": 1.0}]
report.render(config={}, summary={}, history=history)
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
assert "jax" not in sys.modules
assert not [name for name in sys.modules if name.startswith("hetjax.rounds")]
"""
    launches.python(code).check_returncode()


def test_evaluated_metrics_are_drawn_but_losses_and_accuracies(tmp_path):
    values = {"val_loss": 4.5, "val_perplexity": 90.0, "test_perplexity": 95.0, "test_loss": 4.6}
    history = runs.make_history(20, 4, eval=lambda i: values if i % 10 == 9 else None)
    page = runs.section(runs.write(tmp_path, history=history), "Metrics")
    assert "perplexity" in page
    assert "</i>test</span>" in page
    assert "</i>val</span>" in page
    assert page.count("<svg") == 2  # for a wide screen and a narrow one
    known = runs.write(tmp_path, history=runs.make_history(20, 4))  # a loss and an accuracy
    assert not runs.section(known, "Metrics")


def test_times_that_nobody_measured_are_not_shown(tmp_path):
    """Without speeds a virtual clock counts microbatches."""
    summary = runs.SUMMARY | {"emulated": False, "clock": "virtual"}
    page = runs.write(tmp_path, summary=summary, history=runs.make_history(20, 4))
    shown = page.partition("Summary, as written")[0]
    assert "there are no times of rounds" in shown
    for title in ("Time of a round", "Who computes", "Mean round", "Waiting", "against time"):
        assert title not in shown
    assert "loss against epochs" in shown
    timed = runs.write(tmp_path, history=runs.make_history(20, 4))
    assert "Time of a round" in timed
    assert "Mean round" in timed
    assert "there are no times of rounds" not in timed
