"""What is said while a bar moves."""

import io
import sys

import tqdm

from hetjax import messages


def test_what_is_said_stands_on_a_line_of_its_own(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with tqdm.tqdm(total=4, file=told) as bar:
        bar.update(1)
        messages.say("it goes on")
    shown = [line.split("\r")[-1] for line in told.getvalue().split("\n")]
    assert "hetjax: it goes on" in shown
