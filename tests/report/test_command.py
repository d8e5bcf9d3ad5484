"""The command: the same page again from the files of a run, or what is wrong with them."""

import pytest

from hetjax.report import __main__ as command
from hetjax.report import files
from tests.report import runs


def test_the_command_makes_the_page_again_from_the_files(pages, tmp_path, capsys):
    runs.save(tmp_path, runs.make_history(1, 16))
    command.main([str(tmp_path)])
    again = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert again == pages["one round"]
    assert "report.html" in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    history = runs.make_history(20, 4)
    runs.save(tmp_path, history, end='{"round": 20, "ep')
    assert files.read(tmp_path)[1:] == (runs.CONFIG, runs.SUMMARY, history)


def test_the_command_names_what_is_missing_or_broken(tmp_path, capsys):
    config, metrics = tmp_path / "config.json", tmp_path / "metrics.jsonl"
    for path, text, said in (
        (config, "{}", f"No such file or directory: '{config}'"),
        (metrics, "{}\n{broken\n{}\n", f"No such file or directory: '{metrics}'"),
        (metrics, "", "metrics.jsonl, line 2 is not JSON"),
    ):
        with pytest.raises(SystemExit):
            command.main([str(tmp_path)])
        assert said in capsys.readouterr().err
        path.write_text(text)
