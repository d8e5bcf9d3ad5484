"""Rounds: what is planned, summed, updated and reported, and what it makes of the state of a run.

`build` makes the `setup` of what never changes. `planning` says what a round is to do and which
state it leaves; `engine` has the workers do it; `sync` reduces, coordinates the order and updates;
`run` composes them: a state goes in, the next state and a report come out. Imports the parts
(`quota`, `gates`, `ordering`, `topology`), `inputs`, `local`, `losses`, `data`, `processes` and
`checkpoints`; nothing of `fit`, its records, or the command line.
"""
