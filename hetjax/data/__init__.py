"""Data: sources of examples, and the way from an order to microbatches.

- `sources` reads examples by index; `source_checks` refuses what cannot be a source.
- `augmenting` makes views of examples, by epoch.
- `leaves` says what an example is made of; `held` says whether a source has changed.
- `feed` brings examples to the devices, read by threads (`readers`) or by `reader_processes`.
- `choosing` says which feed a run takes, after a `trial` and a look at the memory.
- `iterables` goes through what has no index, `iterable_states` keeps where it stands, and
  `iterable_feed` brings it to the devices.
- `stream` cuts orders into the microbatches of each round; `passes` is one order worked through.
- `ledger` counts how often each example was processed.

Quotas and signs go in; example ids and microbatches come out. Imports `quota` and `ordering`; JAX
in the feeds and `choosing` alone. `hetjax.zoo` has data sets by name.
"""
