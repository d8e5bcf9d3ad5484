"""What a run is given: is it usable, what follows from it, and by what is it known again?

`arguments` makes the configuration and the parts of what `fit` or `Run` is given. `refusals` looks
at the loss, the parameters and the optimiser, `extra_arguments` at what an update takes, `order`
whether the order works with the loss, `rule_identity` at a local rule. `replay` reads the trace of
another run. `fingerprint` has the digests by which a run knows itself again. By `agreement` the
processes of a run compare what they were given.
"""
