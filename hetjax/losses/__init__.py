"""What a loss is: what it may return (`loss`), its weights, the state of its model (`stateful`).

`batch_loss` is a loss over all examples of a round. `forwarding` finds which results of a program
are its arguments.
"""
