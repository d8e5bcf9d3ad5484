"""What a process tells of its end."""

import pytest

from hetjax.liveness import exit_reports


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (ValueError("no such file"), "raised ValueError: no such file", 1),
        (RuntimeError("first\nsecond"), "raised RuntimeError: first", 1),
        (ValueError("x" * 9000), "raised ValueError: " + "x" * 481, 1),
        (SystemExit(3), "left by SystemExit(3)", 1),
        (KeyboardInterrupt(), "was interrupted (KeyboardInterrupt)", 130),
    ],
)
def test_an_end_by_an_exception_says_which(error, words, code):
    ending = exit_reports.of_error(2, caught(error))
    assert (ending.process, ending.words, ending.code) == (2, words, code)
    has_trace = not isinstance(error, SystemExit | KeyboardInterrupt)
    assert ("in caught" in ending.trace) == has_trace


def test_the_launcher_reads_who_ended_first(tmp_path):
    assert exit_reports.read(tmp_path) is None
    late, first = (
        exit_reports.ExitReport(0, "late", time=5.0),
        exit_reports.ExitReport(1, "first", "trace", 2, 4.0),
    )
    exit_reports.write(tmp_path, 0, late)
    exit_reports.write(tmp_path, 1, first)
    (tmp_path / "process-2.ending").write_text("half of")
    assert exit_reports.read(tmp_path) == first
    exit_reports.write(tmp_path / "missing", 0, late)  # a full disk is no further fault
