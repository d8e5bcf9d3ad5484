"""What a test sees of a program that it runs by `tests/programs.py`."""

import pytest

from tests import programs


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import sys; sys.exit('no such file')", 1, "no such file\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_it_ends_as_it_would_by_itself(program, status, said, tmp_path):
    ran = programs.run(["-c", program], tmp_path)
    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr.endswith(said)
    assert bool(ran.stderr) == bool(said)
