"""The launcher: starts the processes of a run on this machine, holds each to its share, restarts.

- `supervisor` runs one attempt after another; `gang` is the processes of one attempt.
- `cpu_shares` and `enter` hold each process to its cores.
- `environment` has the variables that the launcher sets for its workers.
- `faults` finds which worker holds the others up; `stacks` keeps where a process hung.
- `guardian` cleans up if the launcher was killed.

A command line goes in, an exit code comes out. Imports no JAX, and of `comm` and `liveness` only
what needs none.
"""
