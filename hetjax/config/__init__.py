"""The configuration of a run: fields with defaults and units, checks, files.

`groups` has the fields, `fields` what a field is, `checks` what must hold between them, `files` how
they are read. Nested values go in, a frozen `ExperimentConfig` comes out. Imports the parts, by
`kinds`, whose options are fields too; no JAX.
"""

from hetjax.config.experiment import base, completed, from_json, load, to_dict, validate
from hetjax.config.groups import ExperimentConfig

__all__ = ["ExperimentConfig", "base", "completed", "from_json", "load", "to_dict", "validate"]
