"""Checkpoints on the disk: whatever happens, the newest good state of a run is found again.

Arrays by name and a JSON record go in and come out. `leaves` makes such arrays of a pytree and
back, `checkpoint` writes, keeps and finds them, `files` says whether one is still what was written.
Imports `types` alone: what of a run is saved is said in `rounds/resume.py`.
"""
