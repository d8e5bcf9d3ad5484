"""How a run ends before its epochs do: a loss that is not finite, Ctrl-C, a worker that fails."""

import faulthandler
import json
import os
import signal
import sys
import types

import jax
import numpy as np
import pytest

import hetjax
from hetjax.liveness import interrupts
from tests.rounds import problems

ENDS = interrupts.ENDS


def _with_a_nan():
    data, weights = problems.given()
    data["x"][17] = np.nan
    return data, weights


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_a_nonfinite_microbatch_stops_the_run_and_keeps_the_state(local, tmp_path):
    with pytest.raises(hetjax.NonFiniteError, match=r"round \d.*worker \d.*\b17\b"):
        problems.fit(*_with_a_nan(), epochs=1, local=local, workdir=tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_is_raised_between_rounds_with_the_files_written(tmp_path):
    def press(line):
        if line.round == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        short_fit(press, epochs=50, workdir=tmp_path)
    assert str(raised.value).endswith(f"; the same call goes on from there ({tmp_path}).")
    result = raised.value.result
    assert result.summary["interrupted"]
    assert 4 <= result.summary["rounds"] <= 6
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == result.summary
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == written["rounds"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "error"),
    [(n, KeyboardInterrupt if n == signal.SIGINT else SystemExit) for n in interrupts.ENDS],
)
def test_a_signal_is_raised_with_the_result_so_far(number, error, monkeypatch, capsys):
    def press(line):
        if line.round == 1:
            signal.raise_signal(number)

    shell = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with pytest.raises(error) as raised:
        short_fit(press, epochs=50)
    assert getattr(raised.value, "code", 130) == 128 + number
    result = raised.value.result
    assert result.summary["stopped_by"] == signal.Signals(number).name
    assert len(result.history) == result.summary["rounds"] < 10
    assert "result = sys.last_value.result" in capsys.readouterr().err


def short_fit(press, **fields):
    fields = {"callbacks": [press], "raise_on_interrupt": True, "local": "virtual", **fields}
    return problems.train(**fields)


@pytest.mark.parametrize("numbers", [ENDS[:1], ENDS[1:2], ENDS[2:3], ENDS[3:4], ENDS[3:0:-1]])
def test_a_handler_of_the_program_is_called_when_the_run_is_saved(numbers, tmp_path):
    """Of several signals that which the scheduler meant: submitit's USR2 comes with SIGTERM."""
    heard = []

    def press(line):
        if line.round == 1:
            for number in numbers:
                signal.raise_signal(number)

    def hears(number, frame):
        heard.append((number, [path.name for path in (tmp_path / "checkpoints").iterdir()]))

    with interrupts.handled_by(hears):
        summary = short_fit(press, epochs=50, workdir=tmp_path).summary
    assert heard == [(numbers[-1], [f"{summary['rounds']:08d}"])]
    assert (summary["stopped_by"], summary["interrupted"]) == (numbers[-1].name, True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says what C code handles")
def test_signals_that_others_want_are_theirs(tmp_path):
    """nohup's SIGHUP is ignored, and faulthandler dumps the stacks."""

    def press(line):
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)

    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, signal.SIGTERM)}
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            assert short_fit(press, epochs=1).summary["stopped_by"] is None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            faulthandler.unregister(signal.SIGUSR1)
    assert "in press" in (tmp_path / "stacks").read_text()


def test_ctrl_c_in_the_last_round_stops_what_comes_after_the_run(tmp_path):
    def press(line):
        if line.round == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        short_fit(press, epochs=1, workdir=tmp_path)
    assert not raised.value.result.summary["interrupted"]
    assert hetjax.load(tmp_path).summary["rounds"] == 2


def test_a_worker_that_fails_ends_the_run_with_its_error():
    def broken(weights, batch, rng):
        losses = problems.softmax_loss(weights, batch, rng)

        def check(ids):
            if (ids == 5).any():
                raise RuntimeError("example 5 is broken")

        jax.debug.callback(check, batch["id"])
        return losses

    data, weights = problems.given()
    data["id"] = np.arange(64)
    with pytest.raises(jax.errors.JaxRuntimeError, match="example 5 is broken"):
        problems.fit(data, weights, loss_fn=broken, epochs=1)
