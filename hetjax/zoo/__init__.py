"""Reference data sets, models and optimisers by name, for experiments; no part of the core.

- `datasets` knows data sets by name; `builders` read their original files.
- `text` and `series` make arrays of words and of series.
- `prepare` is the command that prepares sets ahead of time.
- `models` are small Flax modules; `optimizers` makes optax chains.
- `config` is the configuration that names them all; `config_files` reads it from files.

A name goes in; sources of examples, a module or a chain come out. Imports `data`, `config` and
`schedules`; nothing else in hetjax imports it. Sets of images and configuration files need the
extra `hetjax[experiments]`.
"""
