"""The cluster that a run plays: speeds, delays and absences of workers, in seconds.

A round's quotas go in, the seconds of each worker come out. Imports `quota`, to play policies
against it; NumPy alone.
"""
