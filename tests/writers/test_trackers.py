"""What each tracker gives back equals the lines that the run had, and is of the same run."""

import importlib
import importlib.util
import json
import pathlib
import warnings

import numpy as np
import pytest

from hetjax import writers
from tests.launcher import launches
from tests.rounds import problems
from tests.writers import readers

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "csv": "csv"}
DATA = problems.classification(64, np.float32)


@pytest.fixture(params=list(PACKAGES))
def name(request, monkeypatch):
    """Of a tracker, which is there and stays on this machine."""
    package = PACKAGES[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'hetjax[{request.param}]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trackers' own modules
        importlib.import_module(package)
        yield request.param


class Sent:
    """Keeps all that a writer is given."""

    def __init__(self):
        self.scalars, self.ended = {}, None

    def write(self, record):
        self.scalars[record.step] = record.scalars

    def close(self, ended):
        self.ended = ended


def fit(workdir, name, *more, **fields):
    weights = problems.initial_weights(np.float32)
    given = [writers.WRITERS[name](every_secs=0), *more]
    fields = {"eval_source": DATA, "epochs": 2, "workers": 2, **fields}
    return problems.fit(DATA, weights, workdir=workdir, writers=given, **fields)


def test_a_reader_gives_back_what_was_sent_and_of_whom_and_a_run_begun_anew_is_a_new_one(
    name, tmp_path
):
    sent, sets = Sent(), {"eval_sources": {"val": DATA, "test": DATA}, "eval_source": None}
    result = fit(tmp_path, name, sent, seed=3, **sets)
    assert sorted(sent.scalars) == [0, 1, 2, 3]
    assert {"train/loss", "val/loss", "test/loss", "workers/1/quota"} <= sent.scalars[3].keys()
    # A process of W&B's own writes its file, and on a busy machine is not done by then.
    launches.eventually(lambda: readers.equal(readers.READERS[name](tmp_path), sent.scalars))
    sent.scalars[2]["train/loss"] += 1e-3
    assert not readers.equal(readers.READERS[name](tmp_path), sent.scalars)
    is_of_its_run(name, tmp_path, result)
    kept = tmp_path / "writers.json"
    before = json.loads(kept.read_text())[name] if kept.exists() else None
    sent = Sent()
    fit(tmp_path, name, sent, epochs=1, resume="overwrite")
    if name == "tensorboard":
        assert readers.purges_of_tensorboard(tmp_path)[-1] == 0
    elif name == "csv":
        assert readers.equal(readers.read_csv(tmp_path), sent.scalars)
    else:
        assert json.loads(kept.read_text())[name] != before


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(name, tmp_path):
    def fail(report):
        if report.round == 5:
            raise RuntimeError("as if it were killed")

    fields = {"checkpoint": {"every_rounds": 2}, "epochs": 4}
    with pytest.raises(RuntimeError, match="as if"):
        fit(tmp_path, name, callbacks=[fail], **fields)
    sent = Sent()
    fit(tmp_path, name, sent, **fields)
    assert sorted(sent.scalars) == [4, 5, 6, 7]  # 4 and 5 once more
    found = readers.READERS[name](tmp_path)
    assert sorted(found) == list(range(8))
    after = {step: sent.scalars[step] for step in (6, 7)}
    assert readers.equal({step: found[step] for step in after}, after)
    if name == "tensorboard":
        assert readers.purges_of_tensorboard(tmp_path) == [0, 4]
    if name == "wandb":
        runs = [r.run.run_id for r in readers.records_of_wandb(tmp_path) if r.HasField("run")]
        assert len(runs) > 1
        assert len(set(runs)) == 1


def is_of_its_run(name, tmp_path, result):
    """Looks for the configuration and the report in the tracker."""
    page = (tmp_path / "report.html").read_text()
    if name == "tensorboard":
        texts = readers.texts_of_tensorboard(tmp_path)
        assert json.loads(texts["configuration"].strip("`json\n")) == result.config
        assert json.loads(texts["summary"].strip("`json\n")) == result.summary
        assert texts["report"] == str(tmp_path / "report.html")
    elif name == "wandb":
        records = list(readers.records_of_wandb(tmp_path))
        config = {u.key: json.loads(u.value_json) for r in records for u in r.config.update}
        config |= {u.key: json.loads(u.value_json) for r in records for u in r.run.config.update}
        assert {key: config[key] for key in result.config} == result.config
        (media,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
        assert media.read_text() == page
    elif name == "mlflow":
        client, run = readers.client_of_mlflow(tmp_path)
        assert run.data.params["seed"] == "3"
        assert run.data.params["quota.policy"] == "adaptive"
        assert run.info.status == "FINISHED"
        path = client.download_artifacts(run.info.run_id, "report.html", str(tmp_path))
        assert pathlib.Path(path).read_text() == page


def test_without_a_place_or_its_package_a_writer_is_refused_before_the_run(name, monkeypatch):
    if name != "wandb":  # which has a place of its own
        with pytest.raises(ValueError, match=rf"writers\.{name}\(\): give it a place"):
            fit(None, name)
    if name != "csv":  # which needs no package
        monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
        with pytest.raises(ModuleNotFoundError, match=rf"pip install 'hetjax\[{name}\]'"):
            writers.WRITERS[name]()


def test_trackers_are_not_imported_before_a_run_has_them():
    code = "import hetjax, sys; hetjax.writers.csv(); print(*sys.modules)"
    loaded = launches.python(code).stdout.split()
    assert "hetjax.writers.mlflow_store" in loaded
    assert not {"tensorboardX", "wandb", "mlflow", "jax", "numpy"} & set(loaded)
