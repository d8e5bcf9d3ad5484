"""What a worker does with its quota: local rules, and the three ways to run them.

`rules` says what a local rule is, `gradients` is the default one, `contract` checks what a rule
returns. `stepped` runs it from a host thread for each worker, `fused` in one program, `virtual` on
one device; `clocks` are the workers'. `calls`, `jitted` and `packing` are the programs of a worker.
"""
