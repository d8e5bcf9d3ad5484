"""The configuration of a run: fields with defaults and units, checks, records.

`groups` has the fields, `fields` what a field is, `checks` what must hold between them;
`experiment` checks nested values and makes a frozen `ExperimentConfig` of them; `recorded` compares
it with that of a workdir. Imports the parts, by `kinds`, whose options are fields too; no JAX.
Configuration files, and the fields of data sets, models and optimisers by name, are in
`hetjax.zoo.config`.
"""
