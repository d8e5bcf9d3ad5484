"""Is every process of a run still there, what does it do, and how did it end?

- `heartbeats` tell the launcher what a process does.
- `blocking_waits` are a process's waits for others; `stall_reporter` says them in words.
- `exit_reports` say how a process ended; `failure_detector` tells its own and hears the others'.
- `interrupts` end a run between two rounds.

It knows how processes communicate only by what it is given.
"""
