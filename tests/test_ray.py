"""What of `hetjax.ray` needs no Ray: the rest is in `tests/engines/test_ray.py`."""

import signal
import sys
import threading

import numpy as np
import optax
import pytest

import hetjax
from hetjax.processes import interrupt
from hetjax.writers import hearing


@pytest.mark.parametrize(
    "call",
    [lambda: hetjax.ray.launch(print, [{"CPU": 1}]), lambda: hetjax.ray.loop(print)],
    ids=["launch", "loop"],
)
def test_ray_is_asked_for_where_it_is_missing(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"this needs ray.*pip install 'hetjax\[ray\]'"):
        call()


@pytest.mark.parametrize("resources", [[], {"CPU": 1}, 4, [{}], [{"CPU": 0}], [{"GPU": 1}, "CPU"]])
def test_resources_that_are_none_are_refused(resources):
    with pytest.raises(ValueError, match=r"launch: resources are .*one dict for each worker"):
        hetjax.ray.launch(print, resources)


def test_a_number_of_failures_that_is_none_is_refused():
    with pytest.raises(ValueError, match="max_failures: got -1, must be an integer of at least 0"):
        hetjax.ray.launch(print, [{"CPU": 1}], max_failures=-1)


def trained(workdir=None):
    x = np.ones((16, 2), np.float32)
    return hetjax.fit(
        lambda w, batch, rng: (batch["x"] @ w - 1.0) ** 2,
        np.zeros(2, np.float32),
        optax.sgd(0.1),
        {"x": x},
        eval_source={"x": x},
        epochs=2,
        microbatch_size=4,
        budget=2,
        local="virtual",
        cluster={"secs_per_microbatch": (1.0, 1.0)},
        workdir=workdir,
        progress=False,
    )


def test_a_run_outside_the_main_thread_is_heard_and_handles_no_signal(tmp_path):
    """As Ray Train calls its loop."""
    heard, handlers = [], []
    before = signal.getsignal(signal.SIGTERM)

    def hears(run, report):
        handlers.append(signal.getsignal(signal.SIGTERM))
        heard.append((run.workdir, tuple(run.sets), report.round, report.eval is not None))

    def loop():
        with interrupt.deferred() as came, hearing.heard_by(hears):
            trained(tmp_path)
            assert came() is None
        trained()  # not heard any more

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert heard == [(tmp_path, ("test",), n, n % 2 == 1) for n in range(4)]
    assert set(handlers) == {before}
