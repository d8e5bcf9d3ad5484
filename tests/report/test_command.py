"""The command: the same page again from the files of a run, or what is wrong with them."""

import json

import pytest

from hetjax.report import __main__ as command
from hetjax.report import files
from tests.report import runs


def save(directory, *, history, end=""):
    """Writes the files of a run, and `end` after the last line of the metrics."""
    (directory / "config.json").write_text(json.dumps(runs.CONFIG))
    (directory / "summary.json").write_text(json.dumps(runs.SUMMARY))
    lines = [json.dumps(record) + "\n" for record in history]
    (directory / "metrics.jsonl").write_text("".join(lines) + end)


def test_the_command_makes_the_page_again_from_the_files(pages, tmp_path, capsys):
    save(tmp_path, history=runs.make_history(1, 16))
    command.main([str(tmp_path)])
    again = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert again == pages["one round"]
    assert "report.html" in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    history = runs.make_history(20, 4)
    save(tmp_path, history=history, end='{"round": 20, "ep')
    assert files.read(tmp_path)[1:] == (runs.CONFIG, runs.SUMMARY, history)


def test_the_command_names_what_is_missing_or_broken(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert f"No such file or directory: '{tmp_path / 'config.json'}'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert f"No such file or directory: '{tmp_path / 'metrics.jsonl'}'" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("{}\n{broken\n{}\n")
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert "metrics.jsonl, line 2 is not JSON" in capsys.readouterr().err
