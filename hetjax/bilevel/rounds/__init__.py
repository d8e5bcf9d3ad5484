"""The two levels of a bilevel problem inside rounds: each request of an estimator is a round.

`rules` says what a worker adds up to answer a request. `level` has a level's rounds, with their
source, order and ledger. `stepping` has what the estimator computes between two rounds, and
`carried_leaves` finds what of a request it holds already. `setup` makes these of what a user gives.
`run` drives one outer step, `outer_steps` is the driver's task, `saving` has its checkpoints, and
`outer_report`, `summary` and `results` say what came of it. Imports `hetjax.rounds` and what
is below it.
"""
