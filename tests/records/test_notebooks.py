"""What a cell of a notebook shows: one line that moves, and a result that is left when stopped."""

import os
import pathlib
import signal
import threading
import time

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra 'notebooks' is not installed")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = pathlib.Path(__file__).parents[2]

BEGIN = """
import hetjax
hetjax.use_cpu_workers(2)
import pathlib, numpy as np, optax
data = {"x": np.arange(4096, dtype=np.float32)}
settings = {"budget": 4, "microbatch_size": 8, "cluster": {"secs_per_microbatch": (0.002, 0.004)}}

def loss(params, batch, rng):
    return (batch["x"] * params - 1) ** 2

def run(**more):
    return hetjax.fit(loss, np.float32(0), optax.sgd(1e-9), data, **settings, **more)
"""
STOPPED = """
def tell(report):
    if report.round == 20:
        pathlib.Path(HERE).touch()

result = run(epochs=1000, callbacks=[tell])
"""
LOOK = """
import sys
result = sys.last_value.result
went_on = run(epochs=1, init_state=result.state)
assert result.summary["stopped_by"] == "SIGINT" and result.params > 0
assert went_on.params > result.params
result
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The outputs of each cell, executed; the third is interrupted while it trains."""
    here = tmp_path_factory.mktemp("notebook") / "here"
    notebook = nbformat.v4.new_notebook()
    cells = (BEGIN + f"HERE = {str(here)!r}", "run(epochs=1)", STOPPED, LOOK)
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    client = nbclient.NotebookClient(
        notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(ROOT)}}
    )

    def interrupt():
        while not here.exists():
            time.sleep(0.05)
        os.kill(client.km.provisioner.pid, signal.SIGINT)  # as the notebook's stop button does

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def test_the_progress_bar_is_one_line_that_ends_at_its_end(cells):
    begin, trained, _, _ = cells
    assert not begin
    bar, result = trained
    assert bar.output_type == "display_data"
    assert bar.data["text/plain"].startswith("100%")
    assert len(bar.data["text/plain"].splitlines()) == 1
    assert "<svg" in result.data["text/html"]


def test_an_interrupted_cell_leaves_a_result_that_is_looked_at_and_gone_on_with(cells):
    stopped, looked = cells[2:]
    assert [output.ename for output in stopped if output.output_type == "error"] == [
        "KeyboardInterrupt"
    ]
    said = "".join(output.text for output in stopped if output.output_type == "stream")
    assert "result = sys.last_value.result" in said
    assert [output.output_type for output in looked] == ["display_data", "execute_result"]
    assert "ended by SIGINT" in looked[-1].data["text/plain"]
