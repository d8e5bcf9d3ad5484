"""How the processes of a run communicate: who belongs to it, and what they tell each other.

- `runtime` is what this process is in its run, and all state that it keeps of that.
- `communicator` is what the rounds know of other processes: who is there, messages, sums, rows to
  neighbours. `backends` has its implementations for processes that are joined, and chooses;
  `elastic` has the one for processes that come and go.
- `join` makes a process one of several; `hosts` says on which machine each runs, and whether all
  can be reached; `gpus` which GPUs a process sees, and whether processes share one.
- `key_value_store` holds small values that all processes see.
- `referee` decides the rounds of a run whose processes come and go; it is a pure function, which
  `referee_host` holds. `membership` says who takes part, as one process sees it. A `carrier`
  reaches the host and moves arrays; `local_carrier` does so on one machine.
- `allgather_work` tells all what each did in a round; `socket_allgather` carries it on one machine.
- `shared_sums` adds up on the host, in memory that processes share, or what they have put up.
- `broadcast_once` are numbers that one process computes for all.

Bytes, JSON values and arrays go in and out. It knows no round.
"""
