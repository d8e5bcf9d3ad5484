"""The report: one file that loads nothing, right numbers, small, and no input breaks it."""

import html
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from hetjax.training import pictures, report


def make_history(num_rounds, num_workers, *, rounds_per_epoch=10, **replaced):
    """A run of `num_rounds` rounds; each replaced field is given as a function of the round."""
    history = []
    for i in range(num_rounds):
        quotas = [2 + (j + i // 7) % 3 for j in range(num_workers)]
        compute = [0.01 * quota * (1 + 0.1 * j) for j, quota in enumerate(quotas)]
        record = {
            "round": i,
            "epoch": i // rounds_per_epoch,
            "examples": 32 * sum(quotas),
            "examples_processed": 320 * (i + 1),
            "loss": 2.0 / (1 + i),
            "quotas": quotas,
            "microbatches_done": quotas,
            "compute_secs": compute,
            "start_secs": 0.5 * i,
            "round_secs": max(compute) + 0.002,
            "local_secs": max(compute),
            "waiting_fraction": 0.25,
            "present": [True] * num_workers,
        }
        if i % rounds_per_epoch == rounds_per_epoch - 1:
            record["eval"] = {"test_loss": 1.0 / (1 + i), "test_accuracy": 0.9}
        record |= {name: value(i) for name, value in replaced.items()}
        history.append(record)
    return history


SUMMARY = {
    "test_accuracy": 0.9731,
    "best_test_accuracy": 0.9812,
    "test_loss": 0.1234,
    "train_loss": 0.0567,
    "rounds": 20,
    "epochs": 2,
    "examples_processed": 35_940,
    "examples_missing": 3,
    "examples_duplicated": 17,
    "wall_secs": 61.5,
    "round_secs_mean": 0.0412,
    "optimal_round_secs": 0.0403,
    "fraction_of_optimum": 0.978,
    "equal_split_secs": 0.0824,
    "waiting_fraction": 0.0219,
    "quotas": [8, 6, 4, 2],
    "emulated": True,
}
CONFIG = {"data": {"name": "digits"}, "model": {"name": "lenet"}, "seed": 3}


def write(tmp_path, *, config=CONFIG, summary=SUMMARY, history=()):
    path = tmp_path / "report.html"
    report.write_report(path, config=config, summary=summary, history=list(history))
    return path.read_text(encoding="utf-8")


def tiles(page):
    """What each tile shows: name -> (number, the line below)."""
    pattern = r'<dt>(.*?)</dt><dd class="value">(.*?)</dd><dd>(.*?)</dd>'
    return {html.unescape(n): (html.unescape(v), b) for n, v, b in re.findall(pattern, page)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of 8 and of 16 workers: lines and a heat map of quotas."""
    return [
        write(tmp_path_factory.mktemp("page"), history=make_history(20, num_workers))
        for num_workers in (8, 16)
    ]


def test_the_page_loads_nothing_and_runs_nothing(pages):
    for page in pages:
        assert "http" not in page
        assert "<script" not in page
        assert "@import" not in page
        loads = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page)
        assert loads
        assert all((a or b).startswith(("#", "data:image/png;base64,")) for a, b in loads)


def test_every_reference_inside_the_page_has_exactly_one_target(pages):
    for page in pages:
        targets = re.findall(r'\bid="([^"]*)"', page)
        wanted = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
        assert {a or b for a, b in wanted} <= set(targets)
        assert len(targets) == len(set(targets))


def test_no_stand_in_colour_is_left_in_the_page(pages):
    for page in pages:
        assert not [colour for colour in pictures.VARIABLES if colour in page]
    used = set(re.findall(r"var\(--([\w-]+)\)", pages[0]))
    defined = set(re.findall(r"--([\w-]+):", pages[0]))
    assert {"ink", "accent", "w0", "w7", "on-w0"} <= used <= defined


def test_strings_are_escaped(tmp_path):
    bad = "</pre><script>alert('&')</script>"
    history = make_history(10, 2, eval=lambda i: {f"{bad}loss": 1.0, f"{bad}accuracy": 0.5})
    config = {"data": {"name": bad}, "model": bad, bad: bad}
    page = write(tmp_path, config=config, summary=SUMMARY | {"device_kind": bad}, history=history)
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in page


def test_tiles_show_the_numbers_of_the_summary(tmp_path):
    shown = tiles(write(tmp_path, history=make_history(20, 4)))
    assert shown["Test accuracy"] == (
        "97.3 %",
        "best 98.1 %, test loss 0.1234, training loss 0.0567",
    )
    assert shown["Mean round"] == ("41.2 ms", "optimum 40.3 ms, emulated speeds")
    assert shown["Against the optimum"][0] == "97.8 %"
    assert shown["Against an equal split"][0] == "2.00\N{MULTIPLICATION SIGN}"
    assert "82.4 ms, emulated speeds" in shown["Against an equal split"][1]
    assert shown["Waiting"][0] == "2.2 %"
    assert shown["Missing and duplicated"] == ("3 and 17", "of 35,940 examples processed")
    assert shown["Quotas at the end"][0] == "8 : 6 : 4 : 2"
    assert shown["Wall time"] == ("61.5 s", "20 rounds")


def test_emulated_is_said_only_where_it_is_so(tmp_path):
    def said(emulated):
        page = write(tmp_path, summary=SUMMARY | {"emulated": emulated})
        return page.split("<details>")[0].count("emulated")

    assert said(True) == 4  # the heading, and the three tiles that compare
    assert said(False) == 0


@pytest.mark.parametrize("key", list(SUMMARY))
def test_a_missing_number_is_left_out_and_breaks_nothing(tmp_path, key):
    names = {
        "examples_missing": "Missing and duplicated",
        "waiting_fraction": "Waiting",
        "round_secs_mean": "Mean round",
        "equal_split_secs": "Against an equal split",
        "fraction_of_optimum": "Against the optimum",
        "wall_secs": "Wall time",
        "quotas": "Quotas at the end",
        "test_accuracy": "Test accuracy",
    }
    for absent in ({k: v for k, v in SUMMARY.items() if k != key}, SUMMARY | {key: None}):
        page = write(tmp_path, summary=absent)
        assert names.get(key) not in tiles(page)
        assert "nan" not in page.split("<details>")[0]


@pytest.mark.parametrize("num_workers", [1, 64])
def test_one_and_many_workers_are_drawn(tmp_path, num_workers):
    page = write(tmp_path, summary={}, history=make_history(14, num_workers))
    assert f"{num_workers} worker" in page
    assert page.count("<svg") == 10  # five pictures, each for wide and narrow screens
    assert ("data:image/png" in page) == (num_workers > 8)  # the heat map


@pytest.mark.parametrize(("num_rounds", "panels"), [(1, ["All rounds"]), (7, ["First", "Last"])])
def test_short_runs_are_drawn(tmp_path, num_rounds, panels):
    page = write(tmp_path, summary={}, history=make_history(num_rounds, 3))
    assert all(panel in page for panel in panels)
    assert ("Last rounds" in page) == (num_rounds > 6)


def test_a_run_without_rounds_says_so(tmp_path):
    page = write(tmp_path, config={}, summary={})
    assert "No round was finished" in page
    assert "<svg" not in page


@pytest.mark.parametrize("bad", [float("nan"), None, float("inf")])
def test_losses_that_are_not_numbers_leave_gaps(bad):
    some = make_history(12, 2, loss=lambda i: bad if i % 2 else 1.0)
    assert "no finite loss" not in pictures.losses(some, {}, width=900)
    none = make_history(12, 2, loss=lambda i: bad, eval=lambda i: None)
    assert "no finite loss" in pictures.losses(none, {}, width=900)


def test_rounds_without_a_finite_loss_and_skipped_examples_are_counted(tmp_path):
    odd = {"loss": lambda i: None if i % 2 else 1.0, "skipped_examples": lambda i: 8 * (i < 4)}
    page = write(tmp_path, history=make_history(6, 1, **odd))
    assert "3 of 6 rounds have no finite training loss" in page
    assert "32 examples were skipped" in page


def test_a_run_that_was_stopped_says_so(tmp_path):
    assert "stopped before its end" in write(tmp_path, summary=SUMMARY | {"interrupted": True})
    assert "stopped before its end" not in write(tmp_path)


def test_a_worker_that_is_absent_is_named_so():
    history = make_history(12, 3, present=lambda i: [True, i < 6, True])
    picture = pictures.quotas(history, width=900)
    assert "worker 1: absent" in picture
    assert "worker 2: absent" not in picture


@pytest.mark.parametrize("odd", [None, "x", [None, "x", 3.0]])
def test_odd_fields_break_nothing(tmp_path, odd):
    names = list(make_history(1, 2)[0])
    history = make_history(2 * len(names), 2)
    for i, name in enumerate(names):
        history[2 * i + 1][name] = odd
    page = write(tmp_path, summary={}, history=history)
    assert page.count("<svg") >= 8


def test_lines_without_fields_are_drawn(tmp_path):
    page = write(tmp_path, summary={}, history=[{"round": 0}, {}, {"loss": 1.0, "quotas": None}])
    assert "2 of 3 rounds have no finite training loss" in page


def test_a_long_run_stays_small(tmp_path):
    history = make_history(50_000, 4, rounds_per_epoch=25)
    page = write(tmp_path, history=history)
    assert len(page) < 1_000_000
    assert "… 49,976 rounds …" in page


def test_thinned_lines_keep_their_range_and_their_mean():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[1234] = 50.0
    middle, mean, low, high = pictures.thin(x, y, points=100)
    assert high.max() == 50.0
    assert low.min() == y.min()
    np.testing.assert_allclose(mean, y.reshape(100, 100).mean(1), rtol=1e-12)
    np.testing.assert_allclose(middle, x.reshape(100, 100).mean(1), rtol=1e-12)


def test_the_short_round_of_an_epoch_is_left_out():
    quotas = [[4, 4], [4, 4], [1, 1], [5, 3], [6, 2], [1, 0]]
    lines = [{"round": i, "epoch": i // 3, "quotas": q} for i, q in enumerate(quotas)]
    assert [r["round"] for r in pictures.full_rounds(lines)] == [0, 1, 3, 4]
    said = [line | {"full": i != 1} for i, line in enumerate(lines)]
    assert [r["round"] for r in pictures.full_rounds(said)] == [0, 2, 3, 4, 5]


def test_epochs_count_examples_over_examples_of_a_pass():
    lines = [{"epoch": i // 2, "examples_processed": p} for i, p in enumerate([60, 100, 160])]
    np.testing.assert_allclose(pictures.epochs_done(lines, {}), [0.6, 1.0, 1.6])
    summary = {"epochs": 1, "examples_processed": 100}
    np.testing.assert_allclose(pictures.epochs_done(lines[:2], summary), [0.6, 1.0])


def test_the_callers_matplotlib_settings_neither_matter_nor_change(tmp_path):
    import matplotlib

    history = make_history(8, 2)
    plain = write(tmp_path, history=history)
    with matplotlib.rc_context({"axes.labelpad": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert write(tmp_path, history=history) == plain
        assert dict(matplotlib.rcParams) == before


def test_the_command_makes_the_page_again_from_the_files(tmp_path, capsys):
    history = make_history(20, 4)
    expected = write(tmp_path, history=history)
    (tmp_path / "report.html").unlink()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    lines = [json.dumps(record) for record in history]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"round": 20, "ep']))
    report.main([str(tmp_path)])
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == expected
    assert "report.html" in capsys.readouterr().out


def test_the_command_names_what_is_missing_or_broken(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "config.json is missing" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "metrics.jsonl is missing" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("{}\n{broken\n{}\n")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path)])
    assert "metrics.jsonl, line 2 is not JSON" in capsys.readouterr().err


def test_reports_need_neither_pyplot_nor_jax(tmp_path):
    code = """
import sys
from hetjax.training import report
assert "matplotlib" not in sys.modules
history = [{"loss": 1.0, "quotas": [1, 2]}]
report.write_report(sys.argv[1], config={}, summary={}, history=history)
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "report.html")], check=True)
