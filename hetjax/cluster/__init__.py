"""The cluster that a run emulates: speeds, delays and absences of workers, in seconds.

`emulate` has all of it. A round's quotas go in, the seconds of each worker come out. Imports
`quota`, to run policies on it; needs only NumPy.
"""
