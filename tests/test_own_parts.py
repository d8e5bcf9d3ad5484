"""The user's own parts in runs: given, written down, gone on with, and refused."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import hetjax
from hetjax import gates, parts, quota, topology
from hetjax.cluster import emulate
from hetjax.zoo import config
from tests.own_parts import OWN, gate, order, reducer
from tests.rounds import problems

ROOT = pathlib.Path(__file__).parent.parent

# --- The user's own, in runs ---

DATA, WEIGHTS = problems.classification(61, np.float32), problems.initial_weights(np.float32)
CLUSTER = emulate.EmulatedCluster((0.01, 0.02, 0.03, 0.04))


def fit(**fields):
    fields = {"epochs": 2, "cluster": CLUSTER, "local": "virtual", **fields}
    return problems.fit(DATA, WEIGHTS, **fields)


@pytest.mark.parametrize("local", ["stepped", "fused"])
@pytest.mark.parametrize("signed", [False, True])
def test_own_parts_train_together_and_alike_in_all_local_forms(local, signed, float64):
    fields = {name: own[-1 if signed else 0] for name, own in OWN.items()}
    if local == "fused":  # which has no gate
        del fields["gate"]
    speeds = (1.0, 2.0, 3.0, 4.0)
    cluster = {"num_workers": 4, "secs_per_microbatch": speeds, "clock": "virtual"}
    data, weights = problems.classification(61), problems.initial_weights()
    one, other = (
        problems.fit(data, weights, epochs=2, cluster=cluster, local=form, **fields)
        for form in (local, "virtual")
    )
    for result in (one, other):
        summary = result.summary
        assert (summary["examples_missing"], summary["examples_duplicated"]) == (0, 0)
        assert summary["examples_processed"] == 122
        closed = any(line["quotas"] != line["microbatches_done"] for line in result.history)
        assert closed == (local != "fused")
    assert [line["quotas"] for line in one.history] == [line["quotas"] for line in other.history]
    assert not np.array_equal(one.params, weights)
    np.testing.assert_allclose(one.params, other.params, rtol=1e-9)


def test_objects_names_and_dicts_are_the_same_run():
    runs = [
        fit(quota=q, ordering=o, reducer=r, gate=g, seed=3)
        for q, o, r, g in (
            (
                quota.adaptive(min_gain=0.3),
                hetjax.ordering.pair_balance(block_pairs=1),
                topology.matcha(budget=0.7),
                gates.quorum(5),
            ),
            (
                {"policy": "adaptive", "min_gain": 0.3},
                {"method": "pair_balance", "block_pairs": 1},
                {"name": "matcha", "budget": 0.7},
                {"trigger": "quorum", "quorum": 5},
            ),
            (
                {"policy": quota.adaptive(min_gain=0.3), "max_microbatches": 0},
                "tests.test_own_parts:pairs_of_one",
                {"name": topology.matcha(budget=0.7, graph=topology.make_graph("ring", 4))},
                {"trigger": gates.quorum(5)},
            ),
        )
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.params, runs[0].params)
        assert [line["quotas"] for line in run.history] == [
            line["quotas"] for line in runs[0].history
        ]


@parts.factory
def pairs_of_one() -> hetjax.ordering.Ordering:
    """`pair_balance` with blocks of one pair, for a name that is an import path."""
    return hetjax.ordering.pair_balance(block_pairs=1)


def test_a_cluster_is_an_object_or_its_fields():
    cluster = emulate.EmulatedCluster(
        (1.0, 2.0),
        0.5,
        delay="gamma",
        delay_cv=0.3,
        changes=(emulate.Change(3, 1, present=False),),
        seed=9,
    )
    one = fit(cluster=cluster, quota="equal")
    fields = {
        "num_workers": 2,
        "secs_per_microbatch": (1.0, 2.0),
        "overhead_secs": 0.5,
        "delay": "gamma",
        "delay_cv": 0.3,
        "changes": [{"round": 3, "worker": 1, "present": False}],
        "seed": 9,
    }
    other = fit(cluster=fields, quota="equal")
    assert [line["compute_secs"] for line in one.history] == [
        line["compute_secs"] for line in other.history
    ]


# --- What is written down, and a run that goes on ---


def stopping(round):
    return problems.press_ctrl_c(lambda line: line.round == round)


def test_a_run_goes_on_with_its_own_parts_and_no_others(tmp_path):
    own = {"ordering": order.rotated(by=3), "reducer": reducer.rounded_sum()}
    fit(workdir=tmp_path, callbacks=[stopping(2)], **own)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ordering"]["method"] == "tests.own_parts.order:rotated"
    assert written["ordering"]["arguments"] == {"by": 3}
    assert written["reducer"]["name"] == "tests.own_parts.reducer:rounded_sum"
    for other in ({"ordering": order.rotated(by=4)}, {"reducer": "all_reduce"}):
        with pytest.raises(ValueError, match="belongs to another configuration"):
            fit(workdir=tmp_path, **{**own, **other})
    result = fit(workdir=tmp_path, **own)
    whole = fit(**own)
    np.testing.assert_array_equal(result.params, whole.params)


def test_a_closure_is_named_and_must_be_given_again(tmp_path):
    def own():
        made = order.rotated()
        return made._replace(place=lambda *arguments: made.place(*arguments))

    fit(workdir=tmp_path, callbacks=[stopping(2)], ordering=own())
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ordering"]["method"] == "given: tests.own_parts.order:rotated.<locals>.init"
    with pytest.raises(ValueError, match=r"could not be written down.*Give the same object again"):
        fit(workdir=tmp_path)
    with pytest.raises(ValueError, match=r"could not be written down.*Give the object again"):
        config.from_json(tmp_path / "config.json")
    result = fit(workdir=tmp_path, ordering=own())
    assert result.summary["examples_processed"] == 122


def test_a_recorded_configuration_of_before_still_loads_and_is_the_same_run(tmp_path):
    fields = {"workdir": tmp_path, "epochs": 1, "cluster": {"num_workers": 4}}
    fit(**fields)
    written = json.loads((tmp_path / "config.json").read_text())
    new = {"quota": ["min_gain", "gain", "arguments"], "cluster": ["seed"], "gate": ["arguments"]}
    for group, names in new.items():
        for name in names:
            del written[group][name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config.from_json(tmp_path / "config.json")
    fit(**fields)
    with pytest.raises(ValueError, match=r"belongs to another configuration.*seed"):
        fit(**fields, seed=4)


# --- What bad input gets ---


class NoPolicy:
    init = assign = None


MISTAKES = [
    (
        {"quota": NoPolicy()},
        r"has no observe\. Quota policy: a .*assign\(state.*adaptive",
    ),
    ({"quota": quota.equal()._replace(observe=None)}, r"whose observe is None and no function"),
    (
        {"ordering": order.rotated()._replace(place=lambda state: state)},
        r"whose place\(state\) does not take 3 arguments\. Ordering: a hetjax\.ordering\.Ord",
    ),
    ({"gate": gates.quorum}, r"which is a factory: call it"),
    ({"reducer": 3}, r"reducer: got 3, .*hetjax\.topology\.Reducer of make.*Such as reducer="),
    ({"reducer": quota.equal()}, r"which has no make"),
    ({"gate": {"quorum": 3}}, r"gate\.quorum: .*'none' has no such option; it is one of 'quorum'"),
    (
        {"quota": {"policy": "adaptive", "band": 0.1}},
        r"quota\.band: .*one of 'dead_band'\. Did you",
    ),
    (
        {"quota": {"policy": "adaptive", "mingain": 0.1}},
        r"quota\.mingain: there is no such field\. Did you mean 'quota\.min_gain'",
    ),
    (
        {"reducer": {"name": "d_psgd", "graph": "ring", "weights": "uniform"}},
        r"^reducer\.weights: there is no such field\. There are: reducer\.name, reducer\.graph",
    ),
    ({"quota": {"policy": "adaptive", "alarm": -1}}, r"quota\.alarm: got -1, must be a finite"),
    ({"quota": {"policy": quota.equal(), "band": 0.1}}, r"quota: band: .*is made already"),
    ({"quota": "adaptve"}, r"quota\.policy: got 'adaptve', .*Did you mean 'adaptive'"),
    ({"quota": "no.such:policy"}, r"quota\.policy: 'no\.such:policy' cannot be imported"),
    ({"quota": "os:system"}, r"'os:system' is no factory of parts"),
    ({"quota": {"policy": "equal", "arguments": {"a": 1}}}, r"quota\.arguments: .*fields of its"),
    (
        {"gate": "first", "quota": quota.static((1, 1, 1, 0)), "budget": 3},
        r"gate\.trigger: got 'first', but worker 3 has a quota of 0",
    ),
    ({"ordering": "d_grab", "reducer": topology.d_psgd()}, r"'d_grab' does not work with.*ring"),
    ({"cluster": 3}, r"cluster: got 3, but it is a group of fields"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_what_is_no_part_is_refused_with_the_contract(fields, message):
    with pytest.raises(ValueError, match=message):
        problems.fit(DATA, WEIGHTS, **{"epochs": 1, **fields})


def test_arguments_of_a_factory_are_checked():
    for call, message in (
        (lambda: quota.adaptive(alarm="loud"), "adaptive: alarm: got 'loud', must be a finite"),
        (lambda: quota.adaptive(min_gian=1.0), "min_gian: .*Did you mean .*min_gain"),
        (lambda: gate.after(), "after: most: missing, must be an integer of at least 1"),
        (lambda: topology.matcha(budget=2), "matcha: budget: got 2, must be a finite number above"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- Two files for a new part with command-line options ---

NEW_PART = '''
from typing import Annotated
from hetjax import parts
from hetjax.quota import policies

@parts.factory
def patient(
    *, wait_rounds: Annotated[int, parts.integer(at_least=1, unit="rounds", says="it waits")] = 8
) -> policies.QuotaPolicy:
    """Equal quotas, for a test."""
    return policies.equal()._replace(proportions=None)
'''


def test_a_new_part_with_options_needs_its_file_and_a_line_in_the_registry(tmp_path):
    for package in ("hetjax", "experiments"):
        ignored = shutil.ignore_patterns("*.npz", "*.png", "runs", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "hetjax" / "quota" / "patient.py").write_text(NEW_PART)
    registry = tmp_path / "hetjax" / "quota" / "__init__.py"
    line = '    "adaptive": adaptive,\n'
    text = registry.read_text()
    assert line in text
    text = text.replace(line, f'{line}    "patient": patient.patient,\n')
    text = text.replace(
        "from hetjax.quota.shares", "from hetjax.quota import patient\nfrom hetjax.quota.shares"
    )
    registry.write_text(text)
    program = (
        "from absl import app\nfrom experiments import config_flag\nconfig_flag.define()\n"
        "app.run(lambda argv: print(config_flag.get().quota), flags_parser=config_flag.parse_flags)"
    )
    (tmp_path / "program.py").write_text(program)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )

    file = f"--config={ROOT / 'configs' / 'digits.py'}"
    chosen = [file, "--config.quota.policy=patient"]
    ran = run("program.py", *chosen, "--config.quota.wait_rounds=3")
    assert "policy='patient'" in ran.stdout, ran.stderr
    assert "wait_rounds=3" in ran.stdout
    wrong = run("program.py", *chosen, "--config.quota.wait_rounds=0")
    assert "quota.wait_rounds: got 0, must be an integer of at least 1" in wrong.stderr
    other = run("program.py", file, "--config.quota.wait_rounds=3")
    assert "quota.policy='adaptive' has no such option; it is one of 'patient'" in other.stderr
    shown = run("program.py", "--help").stdout
    assert "--config.quota.wait_rounds=8\n      of patient: rounds it waits" in shown
    table = run("-m", "hetjax.config.kinds").stdout
    assert "| `quota.wait_rounds` | patient | `8` |" in table
