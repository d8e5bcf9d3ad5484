"""The page of a run while it goes on: written anew, until the run has ended."""

import json
import threading
import time

import pytest

from hetjax.report import __main__ as command
from hetjax.report import files, watching
from tests.report import runs

HISTORY = runs.make_history(20, 3)


def wait_for(found):
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watching, "_LOOK_SECS", 0.02)


def test_a_run_is_waited_for_and_watched_to_its_end(tmp_path, quick):
    told, page = [], tmp_path / "report.html"
    thread = threading.Thread(
        target=lambda: watching.watch(tmp_path, page, every_secs=1, say=told.append)
    )
    thread.start()
    wait_for(lambda: told)
    assert "it has no metrics.jsonl yet" in told[0]
    assert not page.exists()  # a workdir with a page and no run is nobody's
    runs.save(tmp_path, HISTORY[:5], summary={})
    wait_for(lambda: page.exists() and "The run goes on: 5 rounds" in page.read_text())
    assert '<meta http-equiv="refresh" content="1">' in page.read_text()
    runs.save_lines(tmp_path, HISTORY[:9])
    wait_for(lambda: "The run goes on: 9 rounds" in page.read_text())
    runs.save_lines(tmp_path, HISTORY)
    (tmp_path / "summary.json").write_text(json.dumps(runs.SUMMARY))
    thread.join(60)
    assert not thread.is_alive()
    assert "the run has ended after 20 rounds" in told[-1]
    command.main([str(tmp_path), f"--out={tmp_path / 'again.html'}"])
    assert page.read_text() == (tmp_path / "again.html").read_text()
    assert "refresh" not in page.read_text()


def test_a_page_of_a_run_that_goes_on_has_the_figures_so_far(tmp_path):
    found = files.so_far({"cluster": {"secs_per_microbatch": [0.1]}}, HISTORY[:12])
    assert found["emulated"]
    assert found["rounds"] == 12
    assert found["train_loss"] == pytest.approx((2 / 11 + 2 / 12) / 2, rel=0.1)
    assert found["test_loss"] == HISTORY[9]["eval"]["test_loss"]
    assert found["waiting_fraction"] == 0.25
    assert found["train_secs"] == pytest.approx(5.5 + HISTORY[11]["round_secs"])
    assert files.so_far({}, []) == {"emulated": False, "clock": "wall", "rounds": 0}


def test_a_bilevel_run_is_refused(tmp_path, quick, capsys):
    runs.save(tmp_path, [{"step": 0, "upper_loss": 1.0}], config={}, summary={})
    for more, said in ((["--watch"], "run of a bilevel problem; --watch"), ([], "not at its end")):
        with pytest.raises(SystemExit):
            command.main([str(tmp_path), *more])
        assert said in capsys.readouterr().err
