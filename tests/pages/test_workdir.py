"""The page of the files of a workdir, against what runs write into theirs."""

import ast
import inspect
import json
import re

import numpy as np
import optax
import pytest

import hetjax
from hetjax import bilevel, reported
from hetjax.bilevel.rounds import outer_report
from hetjax.data import stream
from hetjax.records import summary
from tests.bilevel.rounds import problems as levels
from tests.pages.blocks import ROOT
from tests.rounds import problems

PAGE = (ROOT / "docs/reference/workdir.md").read_text()
OF_BILEVEL = ("metrics.jsonl` of `fit_bilevel", "summary.json` of `fit_bilevel")


def section(title):
    (found,) = (s for s in re.split(r"^## ", PAGE, flags=re.M) if s.startswith(f"`{title}`"))
    return found


def fields(title):
    """The fields in the table of a section."""
    cells = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def groups_of(report):
    """The fields of a report's groups; none of what only a callback may ask for."""
    kinds = report.__annotations__.items()
    return {name: plain_fields(kind) for name, kind in kinds if hasattr(kind, "_fields")}


def plain_fields(report):
    """Of a report's line, those of its groups among them."""
    kinds, groups = report.__annotations__.items(), groups_of(report)
    own = {name for name, kind in kinds if "Callable" not in str(kind)}
    return (own - groups.keys()).union(*groups.values())


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """Runs of both kinds, which write as many fields as one run can."""
    made = tmp_path_factory.mktemp("workdirs")
    data, weights = problems.classification(61, np.float32), problems.initial_weights(np.float32)
    speeds = {"num_workers": 4, "secs_per_microbatch": (1.0, 2.0, 3.0, 4.0)}
    more = {"reducer": "d_psgd", "gate": {"trigger": "quorum", "quorum": 5}}
    fields = {"epochs": 2, "cluster": speeds, "local": "virtual", "eval_source": data}
    for name, given in {"plain": {"ordering": "d_grab"}, "gossip": more}.items():
        problems.fit(data, weights, workdir=made / name, **fields, **given)
    bilevel_run(made / "bilevel")
    return made


def bilevel_run(workdir):
    problem, x, y, sources = levels.ridge()
    estimator = bilevel.value_gap(bilevel.descent(optax.sgd(0.1)), 2, multiplier=1.0)
    fields = {"outer_steps": 2, "workers": 2, "workdir": workdir, "progress": False}
    hetjax.fit_bilevel(problem, x, y, estimator, optax.sgd(0.5), **sources, **fields)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_file_of_a_workdir_is_told(workdirs):
    for workdir in workdirs.iterdir():
        for path in workdir.iterdir():
            name = "checkpoints/NUMBER/" if path.is_dir() else path.name
            assert f"`{name}`" in PAGE, path
    (checkpoint, *_) = (workdirs / "plain/checkpoints").iterdir()
    told = set(re.findall(r"^\| `([\w./]+)` \|", PAGE[PAGE.index("## A checkpoint") :], re.M))
    assert {
        f"{path.name}/" if path.is_dir() else path.name for path in checkpoint.iterdir()
    } == told


def test_the_fields_of_a_round_are_those_of_its_line(workdirs):
    told = fields("metrics.jsonl` of `fit")
    assert set(told) == plain_fields(reported.RoundReport)
    always = set(told[: told.index("optimal_round_secs")])
    for name in ("plain", "gossip"):
        for line in lines(workdirs / name / "metrics.jsonl"):
            assert always <= line.keys() <= set(told)


def test_the_fields_of_an_outer_step_are_those_of_its_line(workdirs):
    told = fields(OF_BILEVEL[0])
    assert set(told) == plain_fields(outer_report.OuterReport)
    always = set(told[: told.index("lower_loss")])
    for line in lines(workdirs / "bilevel/metrics.jsonl"):
        assert always <= line.keys() <= set(told)
    of_rounds = {*fields("metrics.jsonl` of `fit"), "step", "level", "request", "is_new"}
    for level in ("upper", "lower"):
        for line in lines(workdirs / f"bilevel/{level}_rounds.jsonl"):
            assert {"step", "level", "request", "is_new"} <= line.keys() <= of_rounds
            assert line["level"] == level


def test_the_groups_of_a_report_are_told():
    for title, report in (
        ("metrics.jsonl` of `fit", reported.RoundReport),
        (OF_BILEVEL[0], outer_report.OuterReport),
    ):
        items = re.findall(r"^- (.*)", section(title), re.MULTILINE)
        told = {group: set(own) for group, *own in (re.findall(r"`(\w+)`", x) for x in items)}
        assert told == {group: own for group, own in groups_of(report).items() if own}


def patterns(names):
    """`train_METRIC` stands for any metric."""
    return [re.sub("SET_METRIC|METRIC", r"\\w+", name) for name in names]


@pytest.mark.parametrize("name", ["plain", "gossip", "bilevel"])
def test_each_field_of_a_summary_is_told(workdirs, name):
    written = json.loads((workdirs / name / "summary.json").read_text())
    told = fields("summary.json` of `fit")
    if name == "bilevel":
        told = fields(OF_BILEVEL[1]) + told[told.index("wall_secs") :]
    told = patterns([each for each in told if each != "SET_METRIC"] + ["test_METRIC"])
    unknown = [key for key in written if not any(re.fullmatch(each, key) for each in told)]
    assert unknown == []
    for group in ("gossip", "gate"):
        for key in written.get(group, {}):
            assert f"`{key}`" in PAGE, key


def test_each_field_that_is_told_of_a_summary_is_one():
    """A run writes some of them only where it has a reason."""
    source = ast.parse(inspect.getsource(summary) + inspect.getsource(stream))  # which counts
    known = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    told = [name for name in fields("summary.json` of `fit") if "METRIC" not in name]
    inner = {"round", "saved", "first_round", "compiling", "wall", "virtual"}
    assert [name for name in told if name not in known | inner] == []
