"""The processes of a run: who belongs to it, and how they tell each other things.

- `membership` says who this process is; `join` joins the others.
- `hosts` says on which machine each process runs, and whether all can be reached.
- `gpus` says which GPUs a process sees, which is its own, and whether processes share one.
- `board` holds small values that all processes see.
- `exchange` carries a short message a round from each process of a machine to each.
- `meeting` is what they do together, for the rounds: who is there, messages, sums; `ways` has its
  implementations, and chooses. `shared_sums` adds up in memory that processes of one machine share.
- `gathering` says what they tell each other after the local phase of a round.
- `solutions` are numbers that one process computes for all.
- `beacons` tell the launcher what a process is doing.
- `endings` say how a process ended; `watch` tells the own ending and hears the others'.
- `waits` are a process's waits for others; `notices` say them in words.

Bytes, JSON values and arrays go in and out. It knows no round.
"""
