"""The fields of data sets by name, in the record of a run."""

import json

import pytest

from hetjax.config import recorded
from hetjax.zoo import config


def recorded_in(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_run_of_a_data_set_goes_on_with_the_same_ones_alone(tmp_path):
    theirs = config.to_dict(config.validate({"data": {"vocabulary": 7}}))
    recorded.check(recorded_in(tmp_path, theirs), theirs)
    other = config.to_dict(config.validate({"data": {"vocabulary": 8}}))
    with pytest.raises(ValueError, match=r"data\.vocabulary: 7 there, 8 here"):
        recorded.check(tmp_path, other)
