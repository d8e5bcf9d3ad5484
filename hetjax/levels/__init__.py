"""The two levels of a bilevel problem inside rounds: each request of an estimator is a round.

`rules` is what a worker adds up to answer a request, `level` a level's rounds with their source,
order and ledger, `stepping` what the estimator computes between two rounds, `setup` makes these of
what a user gives, and `run` drives one outer step. Imports `bilevel`, `data`, `rounds` and what is
below them. A problem, x and y, an estimator and a source for each level come in; a new x and what
was found go out.
"""
