"""Data: sources of examples, and the way from an order to microbatches.

`sources` reads by index (`source_checks` refuses what can be none, `leaves` has what an example is
made of), `feed` brings examples to the devices, by threads (`readers`), and `choosing` says which
feed a run takes, after a `trial`. `stream` cuts an order into the microbatches of each round, over
`passes`, and counts them in the `ledger`. Quotas and signs go in; example ids and microbatches come
out. Imports `quota` and `ordering`; JAX in `feed` and `choosing` alone. `hetjax.zoo` has data sets
by name.
"""
