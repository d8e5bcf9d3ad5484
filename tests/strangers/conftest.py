"""The programs here are run by `test_strangers`, each in a process of its own, and not imported."""

import pathlib

NO_PROGRAMS = ("__init__.py", "conftest.py", "net.py", "test_strangers.py")

collect_ignore = [
    path.name for path in pathlib.Path(__file__).parent.glob("*.py") if path.name not in NO_PROGRAMS
]
