"""How a run ends before its epochs do: a loss that is not finite, Ctrl-C, a worker that fails."""

import json
import os
import signal
import sys
import types

import jax
import numpy as np
import optax
import pytest

import hetjax
from tests.rounds import problems


def _with_a_nan(num_examples=64, dtype=np.float32):
    data = problems.classification(num_examples, dtype)
    data["x"][17] = np.nan
    return data


@pytest.mark.parametrize("local", ["stepped", "fused", "virtual"])
def test_a_nonfinite_microbatch_stops_the_run_and_keeps_the_state(local, tmp_path):
    weights = problems.initial_weights(np.float32)
    with pytest.raises(hetjax.NonFiniteError, match=r"round \d.*worker \d.*\b17\b"):
        problems.fit(_with_a_nan(), weights, epochs=1, local=local, workdir=tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]
    assert (tmp_path / "report.html").exists()


def test_a_nonfinite_microbatch_is_skipped_and_counted(float64):
    data = _with_a_nan(dtype=np.float64)
    weights = problems.initial_weights()
    result = problems.fit(
        data, weights, optimizer=optax.sgd(1.0), epochs=1, budget=16, nonfinite="skip"
    )
    order = np.random.default_rng((0, 0)).permutation(64).reshape(16, 4)
    good = order[~np.any(order == 17, axis=1)].reshape(-1)
    batch = {
        name: x[good].astype(weights.dtype if name == "x" else x.dtype) for name, x in data.items()
    }
    gradient = jax.grad(lambda w: problems.softmax_loss(w, batch, None).mean())(weights)
    np.testing.assert_allclose(result.params, weights - gradient, rtol=1e-6)
    assert result.summary["examples_skipped"] == 4
    assert result.summary["examples_processed"] == 64
    assert result.summary["examples_missing"] == 0


def test_ctrl_c_is_raised_between_rounds_with_the_files_written(tmp_path):
    def press(line):
        if line.round == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        hetjax.fit(
            problems.softmax_loss,
            problems.initial_weights(np.float32),
            optax.sgd(0.1),
            problems.classification(203, np.float32),
            epochs=50,
            budget=8,
            workers=2,
            progress=False,
            callbacks=[press],
            workdir=tmp_path,
        )
    assert str(raised.value).endswith(f"; the same call goes on from there ({tmp_path}).")
    result = raised.value.result
    assert result.summary["interrupted"]
    assert 4 <= result.summary["rounds"] <= 6
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == result.summary
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == written["rounds"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_is_raised_with_the_result_so_far(number, error, monkeypatch, capsys):
    def press(line):
        if line.round == 1:
            signal.raise_signal(number)

    shell = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    fields = {"callbacks": [press], "raise_on_interrupt": True, "local": "virtual"}
    with pytest.raises(error) as raised:
        problems.fit(data, weights, epochs=50, **fields)
    assert getattr(raised.value, "code", 143) == 143
    result = raised.value.result
    assert result.summary["stopped_by"] == signal.Signals(number).name
    assert len(result.history) == result.summary["rounds"] < 10
    assert "result = sys.last_value.result" in capsys.readouterr().err


def test_ctrl_c_in_the_last_round_stops_what_comes_after_the_run(tmp_path):
    def press(line):
        if line.round == 1:
            signal.raise_signal(signal.SIGINT)

    data, weights = problems.classification(64, np.float32), problems.initial_weights(np.float32)
    fields = {"callbacks": [press], "local": "virtual", "workdir": tmp_path}
    with pytest.raises(KeyboardInterrupt) as raised:
        problems.fit(data, weights, epochs=1, raise_on_interrupt=True, **fields)
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

    data = problems.classification(64, np.float32) | {"id": np.arange(64)}
    weights = problems.initial_weights(np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="example 5 is broken"):
        problems.fit(data, weights, loss_fn=broken, epochs=1)
