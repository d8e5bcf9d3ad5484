"""The processes of a run: who belongs to it, and how they tell each other things.

`membership` says who this process is, `join` joins the others, and `arrivals` hears who has not
joined yet. A `board` holds small values that all see. `exchange` carries a short message a round
from each to each. `meeting` says how the processes of a run meet, and `shared_sums` adds up in
memory that those of one machine share. `solutions` are numbers that one computes for all,
`beacons` tell the launcher what a process is doing. `watch` has each process tell how it ends
(`endings`) and hear it of the others, also in its `waits`, which `notices` say in words. What
goes in and out are bytes, JSON values and arrays. Imports `mesh` and `types` alone: it knows no
round.
"""
