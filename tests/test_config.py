"""Configuration: every error by its message, exact round trips, files, overrides."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import pathlib
import re
from typing import Annotated

import hypothesis
import ml_collections
import pytest
from hypothesis import strategies as st

from experiments import option_tables
from hetjax import parts, quota
from hetjax.cluster import emulate
from hetjax.config import fields, recorded
from hetjax.zoo import config

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted(  # of experiments.train, not of experiments.train_bilevel
    path
    for path in (ROOT / "configs").glob("*.py")
    if path.stem != "__init__" and "bilevel import settings" not in path.read_text()
)
SPEEDS = (0.1, 0.2, 0.3, 0.4)


def nested(**dotted):
    """`nested(data__name="x")` is `{"data": {"name": "x"}}`."""
    result: dict = {}
    for name, value in dotted.items():
        group, _, field = name.rpartition("__")
        (result.setdefault(group, {}) if group else result)[field] = value
    return result


FIELD_ERRORS = [
    (nested(epoch=3), "epoch: there is no such field. Did you mean 'epochs'?"),
    (nested(quot__policy="equal"), "quot.policy: there is no such field. Did you mean 'quota.p"),
    (nested(xyzzy=3), "xyzzy: there is no such field. There are: seed, epochs, "),
    (nested(epochs=0), "epochs: got 0, must be an integer of at least 1. The default is 20."),
    (nested(epochs=True), "epochs: got True, must be an integer"),
    (nested(local="steped"), "local: got 'steped', must be one of stepped, fused, virtual. Did"),
    (nested(data__name=""), "data.name: got '', must be a string, not empty."),
    (nested(data=3), "data: got 3, but it is a group of fields. Set data.name, data.dir,"),
    (nested(model__hidden=(4, 0)), "model.hidden: got (4, 0), must be a tuple, each entry an i"),
    (nested(optimizer__learning_rate=float("nan")), "optimizer.learning_rate: got nan, must be"),
    (nested(optimizer__momentum=1), "got 1, must be a finite number of at least 0 and below 1."),
    (nested(optimizer__nesterov=1), "optimizer.nesterov: got 1, must be true or false."),
    (nested(quota__arguments=3), "quota.arguments: got 3, must be a dict of the options of a"),
    (nested(cluster__changes=3), "cluster.changes: got 3, must be a tuple of dicts with keys"),
    (nested(cluster__changes=[3]), "(entry 0 is 3), must be a tuple of dicts"),
    (
        nested(cluster__changes=[{"round": 1, "wrker": 0}]),
        "(entry 0: wrker: there is no such field. Did you mean 'worker'? worker: missing.)",
    ),
]


def leave(when, worker):
    return {"round": when, "worker": worker, "present": False}


def join(when, worker):
    return {"round": when, "worker": worker, "present": True}


CONTRADICTIONS = [
    (
        nested(budget=16, quota__max_microbatches=4, cluster__changes=[leave(7, 1)]),
        "but 3 workers of at most quota.max_microbatches=4 hold 12 (round 7).",
    ),
    (
        nested(budget=3, data__sharing="private", cluster__changes=[leave(0, 1), join(6, 1)]),
        "budget: got 3, must be at least 4 with data.sharing='private'",
    ),
    (
        nested(cluster__changes=[leave(2, 0), leave(2, 1), leave(3, 2), leave(5, 3)]),
        "cluster.changes: no worker is present from round 5 on.",
    ),
    (nested(cluster__secs_per_microbatch=SPEEDS[:3]), "microbatch: got 3 values, must be 4"),
    (
        nested(cluster__secs_per_microbatch=SPEEDS, cluster__overhead_secs=(0.1,)),
        "cluster.overhead_secs: got 1 values, must be",
    ),
    (nested(cluster__clock="virtual"), "cluster.clock: got 'virtual', needs emulated speeds"),
    (nested(cluster__changes=[leave(1, 4)]), "cluster.changes[0].worker: got 4, must be from 0"),
    (nested(cluster__changes=[leave(1, 3)] * 2), "[1]: worker 3 is changed twice at round 1."),
    (nested(cluster__changes=[{"round": 1, "worker": 3}]), "changes[0]: nothing changes"),
    (
        nested(cluster__changes=[{"round": 1, "worker": 3, "secs_per_microbatch": 1}]),
        "changes[0]: a speed changes, but cluster.secs_per_microbatch is ().",
    ),
    (
        nested(quota__policy="static", quota__proportions=(1, 2)),
        "Give speeds, such as --config.quota.proportions=4,3,2,1.",
    ),
    (
        nested(quota__policy="static", quota__proportions=(0, 0, 0, 0)),
        "quota.proportions: got (0.0, 0.0, 0.0, 0.0), one or more must be above 0.",
    ),
    (nested(data__weighting="example"), "data.weighting: got 'example', needs"),
    (
        nested(data__sharing="process_local"),
        "data.sharing: got 'process_local', but each process reads all of data.name='digits'",
    ),
    (nested(optimizer__warmup_epochs=21), "warmup_epochs: got 21.0, must be at most epochs=20."),
    (nested(optimizer__schedule="step"), "decay_every_epochs: got 0.0, must be above 0 with"),
    (
        nested(optimizer__name="adam", optimizer__nesterov=True),
        "optimizer.nesterov: got True with optimizer.name='adam'",
    ),
    (nested(gate__trigger="quorum"), "gate.quorum: got 0, must be from 1 to budget"),
    (
        nested(quota__policy="dead_band", quota__band="wide", quota__min_gain=-1),
        "quota.band: got 'wide', must be a finite number",
    ),
    (
        nested(quota__min_gian=0.1),
        "quota.min_gian: policy='adaptive' has no such option. Did you mean 'quota.min_gain'?",
    ),
    (
        nested(quota__max_microbatch=1),
        "policy='adaptive' has no such option. Did you mean 'quota.max_microbatches'?",
    ),
    (nested(gate__trigger="deadline"), "gate.deadline_secs: got 0.0, must be above 0."),
    (nested(gate__trigger="first", local="fused"), "gate.trigger: got 'first' with local='fused"),
]


@pytest.mark.parametrize(("given", "message"), FIELD_ERRORS + CONTRADICTIONS)
def test_each_mistake_is_refused_by_its_message(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate(given)


def test_several_wrong_fields_have_a_line_each():
    with pytest.raises(ValueError, match="epochs") as caught:
        config.validate(nested(epochs=0, data__nam="x", seed="a"))
    names = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert names == ["epochs", "data.nam", "seed"]


FULL = nested(
    budget=24,
    model__hidden=[64, 32],
    quota__policy="static",
    quota__proportions=[4, 3, 2, 1],
    cluster__secs_per_microbatch=SPEEDS,
    cluster__overhead_secs=[0.0, 0.25, 0, 1],
    cluster__changes=[leave(3, 2), {"round": 4, "worker": 0, "secs_per_microbatch": 1 / 3}],
)


def test_the_frozen_form_has_tuples_floats_and_records():
    experiment = config.validate(FULL)
    assert experiment.model.hidden == (64, 32)
    assert experiment.cluster.overhead_secs == (0.0, 0.25, 0.0, 1.0)
    assert all(type(share) is float for share in dict(experiment.quota.arguments)["proportions"])
    assert experiment.cluster.changes[0] == emulate.Change(round=3, worker=2, present=False)
    hash(experiment)
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.seed = 3


def test_json_round_trips_exactly_and_what_is_loaded_is_complete_and_mutable(tmp_path):
    experiment = config.validate(FULL)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(experiment)))
    assert config.from_json(path) == experiment
    path.write_text(json.dumps(FULL))
    loaded = config.load(path)
    assert isinstance(loaded, ml_collections.ConfigDict)
    assert config.validate(loaded) == experiment
    loaded.epochs = 3
    loaded.cluster.changes = ()
    experiment = config.validate(loaded)
    assert (experiment.epochs, experiment.budget, experiment.cluster.changes) == (3, 24, ())


def test_a_recorded_group_has_the_options_of_the_chosen_part_alone(tmp_path):
    others = {"alarm": 3, "band": 0.5, "arguments": {}}
    given = {"quota": {"policy": "static", "proportions": [4, 3, 2, 1], **others}}
    written = config.to_dict(config.validate(given))
    assert written["quota"] == {
        "policy": "static",
        "max_microbatches": 0,
        "proportions": [4.0, 3.0, 2.0, 1.0],
        "arguments": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    recorded.check(tmp_path, written)
    assert config.to_dict(config.from_json(tmp_path / "config.json")) == written
    less = {**written, "gate": {"trigger": "quorum"}}
    (tmp_path / "config.json").write_text(json.dumps(less))
    with pytest.raises(ValueError, match=r"\(gate\.trigger: 'quorum' there, 'none' here\);"):
        recorded.check(tmp_path, written)


@parts.factory
def with_names_of_fields(
    *,
    max_microbatches: Annotated[int, parts.integer(says="an option of the name of a field")] = 5,
    gain: Annotated[float, parts.number(above=0.0, says="an option")] = 1.0,
) -> quota.QuotaPolicy:
    """A policy of a user's own, an option of which has the name of a field of the group."""
    assert (max_microbatches, gain) == (7, 2.0)
    return quota.equal()


def test_an_option_is_known_from_a_field_of_its_name(tmp_path):
    path = f"{__name__}:with_names_of_fields"
    given = {"policy": path, "max_microbatches": 9, "arguments": {"max_microbatches": 7}, "gain": 2}
    checked = config.validate({"quota": given})
    assert (checked.quota.max_microbatches, dict(checked.quota.arguments)) == (
        9,
        {"max_microbatches": 7, "gain": 2.0},
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(checked)))
    assert config.validate(config.load(tmp_path / "config.json")) == checked
    with pytest.raises(ValueError, match=r"quota\.gain: got -1, must be a finite number above 0"):
        config.validate({"quota": {**given, "gain": -1}})


@parts.factory
def generous(
    *, min_gain: Annotated[float, parts.number(at_least=2.0, says="another option")] = 3.0
) -> quota.QuotaPolicy:
    """A policy whose option has another default and range than that of `adaptive`."""
    return quota.static((min_gain, 1, 1, 1))


def test_parts_of_one_kind_may_state_an_option_differently(monkeypatch):
    monkeypatch.setitem(quota.POLICIES, "generous", generous)
    chosen = [config.validate({"quota": {"policy": p}}).quota for p in ("adaptive", "generous")]
    first, other = (dict(group.arguments)["min_gain"] for group in chosen)
    assert (first, other) == (quota.adaptive().made_by.arguments["min_gain"], 3.0)
    rows = option_tables.rows_of_options()
    stated = {owners: shown for name, owners, shown, *_ in rows if name == "quota.min_gain"}
    assert stated == {"adaptive": repr(first), "generous": "3.0"}
    with pytest.raises(ValueError, match=r"quota\.min_gain: got 1\.5, must be .* of at least 2"):
        config.validate({"quota": {"policy": "generous", "min_gain": 1.5}})
    assert config.validate({"quota": {"policy": "adaptive", "min_gain": 0.5}})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_is_valid_and_round_trips(path, tmp_path):
    experiment = config.validate(config.load(path))
    copied = tmp_path / "config.json"
    copied.write_text(json.dumps(config.to_dict(experiment)))
    assert config.from_json(copied) == experiment
    assert {"base", "get_config"} <= {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "")
        for node in ast.walk(ast.parse(path.read_text()))
    }


LEAVES = fields.leaf_names(config.ExperimentConfig)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(10**400), 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["static", "quorum", "fused", "virtual", "private", "step", "mlp"])
)
CHANGE_KEYS = st.sampled_from([field.name for field in dataclasses.fields(emulate.Change)])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | CHANGE_KEYS, inner, max_size=4)
        | st.lists(st.dictionaries(CHANGE_KEYS, st.integers(0, 4), max_size=4), max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from([*LEAVES, *(name.split(".")[0] for name in LEAVES)]) | st.text(max_size=9)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=300, derandomize=True)
@hypothesis.given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_no_input_gives_anything_but_a_value_error_or_a_round_trip(mutations):
    given_config = copy.deepcopy(config.to_dict(config.ExperimentConfig()))
    for dotted, value in mutations.items():
        *groups, last = dotted.split(".")
        inner = given_config
        for group in groups:
            inner = inner.setdefault(group, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[last] = value
    try:
        experiment = config.validate(given_config)
    except ValueError:
        return
    assert config.validate(json.loads(json.dumps(config.to_dict(experiment)))) == experiment


FILES = [
    ("a.py", "x = 1\n", r"a\.py: has no function get_config\(\)"),
    ("a.py", "def get_config():\n    return 1 / 0\n", r"a\.py, line 2: ZeroDivisionError"),
    ("a.py", "def get_config(:\n", r"a\.py, line 1: SyntaxError"),
    ("a.json", '{\n  "seed" 1\n}\n', r"a\.json: not valid JSON at line 2, column 10: Expect"),
    ("a.json", "[3]\n", r"A configuration is a mapping of fields to values, got \[3\]"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_a_file_that_is_no_configuration_says_what_and_where(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        config.load(path)


@pytest.mark.parametrize("suffix", ["py", "json"])
def test_a_missing_file_names_the_nearest(suffix, tmp_path):
    (tmp_path / f"digits.{suffix}").touch()
    with pytest.raises(ValueError, match=rf"No such file .* Did you mean 'digits\.{suffix}'"):
        config.load(tmp_path / f"digit.{suffix}")
