"""What a loss is: what it may return (`loss`), its weights, the state of its model (`stateful`).

`batch_loss` is a loss over all examples of a round. `independence` looks whether examples see each
other, `forwarding` which results of a program are its arguments.
"""
