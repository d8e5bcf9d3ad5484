"""Several runs on one page: their figures, losses, quotas and waiting, and what is refused."""

import pytest

from hetjax.report import __main__ as command
from hetjax.report import comparison, files
from tests.report import runs


def compared(directories):
    return comparison.render([files.read(directory) for directory in directories])


@pytest.fixture
def pair(tmp_path):
    """A finished run of four workers, and one of two that goes on, with other settings."""
    other = {**runs.CONFIG, "seed": 4, "quota": {"policy": "equal"}}
    slower = runs.make_history(12, 2, loss=lambda i: 3.0, waiting_fraction=lambda i: 0.5)
    return [
        runs.save(tmp_path / "first", runs.make_history(20, 4)),
        runs.save(tmp_path / "second", slower, config=other, summary={}),
    ]


def test_the_page_has_figures_differences_and_pictures_of_all(pair):
    page = compared(pair)
    for heading, pictures in (
        *(("Training loss", 2), ("Evaluated loss", 2), ("Waiting", 2), ("Quotas", 2)),
        *(("Final figures", 0), ("What sets them apart", 0)),
    ):
        assert runs.section(page, heading).count("<svg") == pictures, heading
    assert "second goes on, or was killed" in page
    figures = runs.section(page, "Final figures")
    assert "<td>training loss</td><td>0.0567</td><td>3</td>" in figures
    assert "<td>rounds</td><td>20</td><td>12</td>" in figures
    assert "<td>waiting</td><td>2.2 %</td><td>50.0 %</td>" in figures
    apart = runs.section(page, "What sets them apart")
    assert "<td>seed</td><td>3</td><td>4</td>" in apart
    assert "<td>quota.policy</td><td>-</td><td>equal</td>" in apart
    assert "data.name" not in apart


def test_a_run_without_a_clock_has_no_seconds(pair, tmp_path):
    config = {**runs.CONFIG, "local": "virtual"}
    own = runs.save(tmp_path / "third", runs.make_history(9, 2), config=config, summary={})
    assert "Without seconds, since it has no clock: third." in compared([*pair, own])
    alone = compared([own, runs.save(tmp_path / "4", [], config=config, summary={})])
    assert "over time" not in alone
    assert "<h2>Waiting" not in alone


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    history = runs.make_history(3, 2)
    same = [runs.save(tmp_path / place / "run", history) for place in ("a", "b")]
    assert comparison.names([files.read(directory) for directory in same]) == ["a/run", "b/run"]


def test_other_runs_are_refused_in_a_sentence(pair, tmp_path, capsys):
    bilevel = runs.save(tmp_path / "bilevel", [{"step": 0, "upper_loss": 1.0}])
    other = runs.save(tmp_path / "other", [{"step": 5, "validation_loss": 1.0}])
    for wrong, said in (
        (bilevel, "is a run of a bilevel problem"),
        (other, "are no rounds of training"),
        (tmp_path / "nothing", f"No such file or directory: '{tmp_path / 'nothing/config.json'}'"),
    ):
        with pytest.raises(SystemExit):
            command.main([str(pair[0]), str(wrong), f"--out={tmp_path / 'page.html'}"])
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="17 runs are too many"):
        comparison.render([files.read(pair[0])] * 17)


def test_the_command_writes_the_page(pair, tmp_path, capsys):
    out = tmp_path / "page.html"
    command.main([*map(str, pair), f"--out={out}"])
    assert out.read_text(encoding="utf-8") == compared(pair)
    assert str(out) in capsys.readouterr().out
