"""The fields of reports: in groups for a reader, flat in the lines of `metrics.jsonl`."""

import dataclasses
import json

import numpy as np
import pytest

import hetjax
from hetjax import reported
from tests.pages.test_workdir import groups_of, plain_fields

REPORTS = pytest.mark.parametrize("kind", [hetjax.RoundReport, hetjax.OuterReport])


def line_of(kind):
    """Another number for each field."""
    return {name: number for number, name in enumerate(sorted(plain_fields(kind)))}


@REPORTS
def test_a_report_has_few_fields_and_each_comes_back_from_its_line(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    assert len(names) <= 14
    line, report = line_of(kind), kind.of(**line_of(kind))
    assert report.to_plain() == line
    groups = [getattr(report, name) for name in groups_of(kind)]
    in_groups = [name for group in groups for name in group._fields]
    assert len({*in_groups, *names}) == len(in_groups) + len(names)  # one name, one thing
    for group in groups:
        for name, value in group._asdict().items():
            assert callable(value) or value == line[name]
    if kind is hetjax.RoundReport:
        assert reported.from_plain(json.loads(json.dumps(line))) == report


def test_what_is_not_finite_or_not_known_comes_back():
    line = {name: x for name, x in line_of(hetjax.RoundReport).items() if name != "host_secs"}
    report = reported.from_plain({**line, "loss": None})
    assert np.isnan(report.loss)
    assert report.workers.host_secs is None
    assert report.to_plain() == {**line, "loss": None}


@REPORTS
@pytest.mark.parametrize("name", ["counts", "other"])
def test_a_field_that_a_line_cannot_have_is_refused(kind, name):
    with pytest.raises(TypeError, match=name):
        kind.of(**line_of(kind), **{name: 1})


def test_a_past_report_says_where_the_states_are():
    report = hetjax.RoundReport.of(**line_of(hetjax.RoundReport))
    for ask in (report.params, *report.state):
        with pytest.raises(ValueError, match="this round is past"):
            ask()
