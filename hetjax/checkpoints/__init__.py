"""Checkpoints on the disk: whatever happens, the newest good state of a run is found again.

- `leaves` makes arrays by name of a pytree, and a pytree of them.
- `checkpoint` writes, keeps and finds checkpoints.
- `files` says whether a checkpoint is still what was written.
- `generations` says which of them may be read, and which process writes now.

Arrays by name and a JSON record go in and come out. Imports `types` alone; `rounds/resume.py` says
what of a run is saved.
"""
