"""What a run leaves for the one who started it: `result`, `hetjax.load`."""

import html
import json
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import core, struct

import hetjax
from experiments import train
from hetjax.checkpoints import leaves
from hetjax.records import workdir as workdir_lib
from hetjax.report import __main__ as report_command
from hetjax.zoo import config as config_lib
from tests.rounds import problems

DATA = problems.classification(64, np.float32)


def fit(workdir, **fields):
    fields = {"eval_source": DATA, "epochs": 2, "workers": 2, **fields}
    return problems.fit(DATA, problems.initial_weights(np.float32), workdir=workdir, **fields)


def test_a_notebook_shows_a_result_as_its_text_and_pictures(tmp_path):
    result = fit(tmp_path)
    for shown in (result._repr_html_(), hetjax.load(tmp_path)._repr_html_()):
        assert "<iframe" not in shown
        assert shown.count("<svg") == 3
        for row in repr(result).splitlines()[1:]:
            assert html.escape(row.split("  ")[-1].strip()) in shown


def restored(workdir):
    fields = {"workers": 1, "microbatch_size": 4, "budget": 2}
    weights, rates = problems.initial_weights(np.float32), optax.sgd(0.1)
    with hetjax.Run(problems.softmax_loss, weights, rates, DATA, **fields) as run:
        run.restore(workdir)


def solved(workdir):
    levels = {"upper_source": DATA, "lower_source": DATA}
    hetjax.fit_bilevel(None, None, None, None, None, outer_steps=1, workdir=workdir, **levels)


ENTRIES = {
    "fit": fit,
    "fit_bilevel": solved,
    "load": hetjax.load,
    "Run.restore": restored,
    "writers.sending": lambda workdir: hetjax.writers.sending([], workdir=workdir).__enter__(),
    "python -m hetjax.report": lambda workdir: report_command.main([str(workdir)]),
    "experiments.train": lambda workdir: train.train_and_evaluate(
        config_lib.validate(config_lib.load("configs/digits.py")), workdir
    ),
    "experiments.train_bilevel": workdir_lib.made_directory,
}
ADDRESSES = ["s3://bucket/run", "hdfs:run", "file:///run", pathlib.Path("gs://bucket/run")]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_address_is_no_workdir(name, tmp_path, monkeypatch, capsys):
    epath = pytest.importorskip("etils.epath", reason="etils is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(pathlib.Path(__file__).parents[2] / "configs")
    for address in [*ADDRESSES, epath.Path("az://bucket/run")]:
        with pytest.raises((ValueError, SystemExit)) as told:
            ENTRIES[name](address)
        assert "is an address; give a directory" in f"{told.value} {capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


@pytest.mark.parametrize("reducer", ["all_reduce", "d_psgd"])
def test_a_run_is_loaded_as_it_was_returned(reducer, tmp_path):
    result = fit(tmp_path, reducer=reducer)
    loaded = hetjax.load(tmp_path)
    np.testing.assert_allclose(loaded.params, result.params, rtol=1e-6)
    np.testing.assert_array_equal(loaded.best_params, result.best_params)
    assert loaded.summary == result.summary
    assert loaded.history == result.history
    assert loaded.config == json.loads((tmp_path / "config.json").read_text())
    assert repr(loaded).splitlines()[1:] == repr(result).splitlines()[1:]


@pytest.mark.parametrize(
    "tree", [(1.0, [2.0, {"a/b": 3.0, "c~": ()}, {0: 5.0, 1: 6.0}]), {"x": None}, 4.0]
)
def test_containers_are_made_again(tree):
    form = json.loads(json.dumps(leaves.form_of(tree)))
    made = leaves.build(form, leaves.flatten(tree, "t"), "t")
    assert jax.tree.leaves(made) == jax.tree.leaves(tree)
    assert jax.tree.structure(made) == jax.tree.structure(tree)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        hetjax.load(tmp_path)
    fit(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        hetjax.load(tmp_path)


def test_a_damaged_checkpoint_is_left_where_it_is(tmp_path, capfd):
    fit(tmp_path, checkpoint={"every_rounds": 1})
    newest = max((tmp_path / "checkpoints").iterdir())
    victim = next(path for path in (newest / "arrays").rglob("*") if path.is_file())
    victim.write_bytes(b"")
    assert hetjax.load(tmp_path).params is not None
    assert newest.is_dir()


class Pair(NamedTuple):
    w: Any
    rest: Any = None


@struct.dataclass
class Struct:
    w: Any
    of: str = struct.field(pytree_node=False, default="linear")


def equinox_module(w):
    equinox = pytest.importorskip("equinox")
    return type("Module", (equinox.Module,), {"__annotations__": {"w": Any}})(w)


@pytest.mark.parametrize(
    "made", [Pair, Struct, lambda w: core.freeze({"w": w}), lambda w: [Pair((w,))], equinox_module]
)
def test_load_gives_the_containers_of_what_is_like_it(made, tmp_path):
    data, params = {"x": np.ones((8, 3), np.float32)}, made(np.zeros(3, np.float32))

    def loss_fn(params, state, batch, rng):
        (w,) = jax.tree.leaves(params)
        return (batch["x"] @ w - 1) ** 2, jax.tree.map(lambda leaf: leaf + 1, state)

    fields = {"workers": 2, "local": "virtual", "microbatch_size": 2, "budget": 4, "ema": 0.5}
    fields |= {"model_state": params, "workdir": tmp_path, "progress": False}
    result = hetjax.fit(loss_fn, params, optax.sgd(0.1), data, **fields)
    shapes = jax.eval_shape(lambda: params)
    names = ("params", "best_params", "ema_params", "model_state", "best_model_state")
    for like in (params, shapes):
        loaded = hetjax.load(tmp_path, like=like, like_state=like)
        for name in (*names, "ema_model_state"):
            found, wanted = getattr(loaded, name), getattr(result, name)
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
    with pytest.raises(ValueError, match=r"does not fit .* 'v' is missing"):
        hetjax.load(tmp_path, like={"v": np.zeros(3, np.float32)})
