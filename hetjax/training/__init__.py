"""Training from its beginning to its end: `fit`, and the driver that goes from step to step.

`fitting` has `fit`. `task` says what a driver drives: `steps` is training, whose step is a round.
`driver` begins, calls back, saves and ends.
`train_step` is one step of training for a loop of the user's own.
"""
