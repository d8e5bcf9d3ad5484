"""What JAX has compiled is kept, and devices of one kind share it."""

import os
import subprocess
import sys

import numpy as np
import optax
import pytest

import hetjax
from hetjax import compiled

BEGIN = """
import pathlib, sys, threading
import hetjax
hetjax.use_cpu_workers(4)
import jax, numpy as np, optax
events = []
jax.monitoring.register_event_listener(lambda name, **more: events.append(name))

def fit():
    events.clear()
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(64, 3)).astype(np.float32), "y": np.zeros(64, np.float32)}
    def loss_fn(w, b, rng):
        return (jax.numpy.tanh(b["x"] @ w) - b["y"]) ** 2
    result = hetjax.fit(loss_fn, np.ones(3, np.float32), optax.sgd(0.1), data, epochs=1,
                        microbatch_size=4, budget=8, progress=False)
    misses = events.count("/jax/compilation_cache/cache_misses")
    hits = events.count("/jax/compilation_cache/cache_hits")
    print(misses, hits, float(result.params.sum()))

"""


def run(code, tmp_path):
    """(misses, hits, sum of the parameters) of each run in one process, with a cache below it."""
    environ = {name: value for name, value in os.environ.items() if name[:4] != "JAX_"}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-c", BEGIN + code, str(tmp_path)]
    said = subprocess.check_output(command, env=environ, text=True)
    return [tuple(map(float, line.split())) for line in said.splitlines()]


@pytest.mark.slow
def test_a_run_is_compiled_once_for_all_devices_and_runs_to_come(tmp_path):
    first, second = run("fit()\nfit()\n", tmp_path)
    assert first[0] > 0
    assert second[0] == 0
    assert first[1] >= 3  # what three other workers do with their microbatches
    (third,) = run("fit()\n", tmp_path)
    assert third[0] == 0
    assert first[2] == second[2] == third[2]


def replaced():
    """What stands in modules of JAX and is hetjax's."""
    modules = [each for name, each in sys.modules.items() if name.split(".")[0] == "jax"]
    values = [value for module in modules for value in vars(module).copy().values()]
    values = [getattr(value, "func", value) for value in values]  # of a partial
    return {v for v in values if str(getattr(v, "__module__", "")).startswith("hetjax")}


def test_nothing_of_jax_is_replaced_after_a_run():
    seen = []

    def callback(report):
        with hetjax.Run(*given, epochs=1, **how):  # a run within a run
            seen.append(len(replaced()))
        seen.append(len(replaced()))
        raise KeyError("of the callback")

    given = (
        lambda w, b, rng: (b["x"] - w) ** 2,
        np.float32(0),
        optax.sgd(0.1),
        {"x": np.ones(8, "f")},
    )
    how = {"microbatch_size": 4, "workers": 1, "budget": 1}
    with pytest.raises(KeyError, match="of the callback"):
        hetjax.fit(*given, epochs=1, callbacks=[callback], progress=False, **how)
    assert seen == [1, 1]  # the key of a program
    assert not replaced()


def test_a_directory_that_cannot_be_made_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    compiled.keep(str(tmp_path / "file"))
    assert "compiled programs are not kept in" in capsys.readouterr().err


def test_the_programs_that_were_used_longest_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_MOST_BYTES", 25)
    for age, name in enumerate(["newest", "old", "oldest"]):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    compiled._prune(tmp_path / "of this machine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "old"]
