"""Rounds: what the workers do in one, and what it makes of the state of a run.

A local rule (`rules`; `gradients` is the default) says what a worker does with its microbatches;
`local`, `fused` and `virtual` run it; `sync` reduces, coordinates the order and updates; `planning`
says what a round is to do and which state it leaves; `run` composes them: a state goes in, the
next state and a report come out. Of a loss over a whole round (`batch_loss`) `embeddings` holds the
two passes. `setup` builds a run from its parts. Imports the parts (`quota`, `gates`, `ordering`,
`topology`), `data`, `processes`, `checkpoints` and `config`; nothing of `fit`, its records, or the
command line.
"""
