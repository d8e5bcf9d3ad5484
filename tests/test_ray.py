"""What of `hetjax.ray` needs no Ray: the rest is in `tests/engines/test_ray.py`."""

import signal
import sys
import threading

import numpy as np
import pytest

import hetjax
from hetjax.liveness import interrupts
from hetjax.writers import hearing
from tests.rounds import problems


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = r"this needs ray.*pip install 'hetjax\[ray\]'"
    with pytest.raises(ModuleNotFoundError, match=missing):
        hetjax.ray.launch(print, [{"CPU": 1}])
    with pytest.raises(ModuleNotFoundError, match=missing):
        hetjax.ray.loop(print)


@pytest.mark.parametrize("resources", [[], {"CPU": 1}, 4, [{}], [{"CPU": 0}], [{"GPU": 1}, "CPU"]])
def test_resources_and_numbers_of_failures_that_are_none_are_refused(resources):
    with pytest.raises(ValueError, match=r"launch: resources are .*one dict for each worker"):
        hetjax.ray.launch(print, resources)
    with pytest.raises(ValueError, match="max_failures: got -1, must be an integer of at least 0"):
        hetjax.ray.launch(print, [{"CPU": 1}], max_failures=-1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"elastic": True, "min_workers": 0}, "min_workers: got 0, must be an integer of at least"),
        ({"elastic": True, "min_workers": 3}, "min_workers: got 3, must be an .* at most 2"),
        ({"elastic": True, "min_workers": 1.5}, "min_workers: got 1.5, must be an integer"),
        ({"elastic": True, "late_secs": 0}, "late_secs: got 0, must be a .* above 0"),
        ({"min_workers": 2}, "min_workers and late_secs need elastic=True"),
        ({"late_secs": 5.0}, "min_workers and late_secs need elastic=True"),
    ],
)
def test_fields_of_elastic_runs_are_checked_and_need_elastic(fields, words):
    with pytest.raises(ValueError, match=f"launch: {words}"):
        hetjax.ray.launch(print, [{"CPU": 1}] * 2, **fields)


def trained(workdir=None):
    data, weights = problems.classification(16, np.float32), problems.initial_weights(np.float32)
    fields = {"eval_source": data, "local": "virtual", "workers": 2, "workdir": workdir}
    return problems.fit(data, weights, epochs=2, budget=2, **fields)


def test_a_run_outside_the_main_thread_is_heard_and_handles_no_signal(tmp_path):
    """As Ray Train calls its loop."""
    heard, handlers = [], []
    before = signal.getsignal(signal.SIGTERM)

    def hears(run, report):
        handlers.append(signal.getsignal(signal.SIGTERM))
        heard.append((run.workdir, tuple(run.sets), report.round, report.eval is not None))

    def loop():
        with interrupts.deferred() as came, hearing.heard_by(hears):
            trained(tmp_path)
            assert came() is None
        trained()  # not heard any more

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert heard == [(tmp_path, ("test",), n, n % 2 == 1) for n in range(4)]
    assert set(handlers) == {before}
