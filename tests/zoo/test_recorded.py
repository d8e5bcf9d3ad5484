"""The fields of data sets by name, in the record of a run."""

import json

import pytest

from hetjax.config import experiment, recorded
from hetjax.zoo import config

OF_A_RUN = experiment.to_dict(experiment.validate({}))
OF_DATA_SETS = ("vocabulary", "length", "features", "num_features", "past", "future")


def recorded_in(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_run_of_other_data_goes_on_whose_record_has_them(tmp_path):
    defaults = config.to_dict(config.validate({}))["data"]
    assert not OF_A_RUN["data"].keys() & set(OF_DATA_SETS)
    more = {name: defaults[name] for name in OF_DATA_SETS}
    theirs = OF_A_RUN | {"data": OF_A_RUN["data"] | more}
    recorded.check(recorded_in(tmp_path, theirs), OF_A_RUN)
    levels = {"upper": theirs, "lower": theirs, "data": theirs["data"]}
    ours = {"upper": OF_A_RUN, "lower": OF_A_RUN, "data": OF_A_RUN["data"]}
    recorded.check(recorded_in(tmp_path, levels), ours)


def test_a_run_of_a_data_set_goes_on_with_the_same_ones_alone(tmp_path):
    theirs = config.to_dict(config.validate({"data": {"vocabulary": 7}}))
    recorded.check(recorded_in(tmp_path, theirs), theirs)
    other = config.to_dict(config.validate({"data": {"vocabulary": 8}}))
    with pytest.raises(ValueError, match=r"data\.vocabulary: 7 there, 8 here"):
        recorded.check(tmp_path, other)


def test_what_an_older_record_lacks_has_its_default(tmp_path):
    ours = config.to_dict(config.validate({}))
    older = ours | {"model": {"name": "small_cnn"}}
    assert recorded.read(recorded_in(tmp_path, older), ours) == ours
