"""What a test sees of a program that it runs by `tests/programs.py`."""

import json

import pytest

from tests import programs

SEEN = """
import json, os, sys

import jax

found = [sys.argv, os.getcwd(), os.environ["OWN"], __name__, len(jax._src.xla_bridge._backends)]
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no such file')", 1, "no such file\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'last')", 0, "last"),
        ("import tests.no_such", 1, "ModuleNotFoundError: No module named 'tests.no_such'\n"),
    ],
)
def test_it_ends_as_it_would_by_itself(program, status, said, tmp_path):
    ran = programs.run(["-c", program], tmp_path)
    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr.endswith(said)
    assert bool(ran.stderr) == bool(said)


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_has_arguments_a_directory_and_variables_of_its_own_and_no_device_yet(kind, tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    begin = {"-c": ["-c", SEEN], "-m": ["-m", "seen"], "file": ["seen.py"]}[kind]
    ran = programs.run([*begin, "--flag"], tmp_path, OWN="yes")
    (name, *arguments), *others = json.loads(ran.stdout)
    assert name == {"-c": "-c", "-m": str(tmp_path / "seen.py"), "file": "seen.py"}[kind]
    assert arguments == ["--flag"]
    assert others == [str(tmp_path), "yes", "__main__", 0]


def test_it_does_not_see_what_another_left(tmp_path):
    programs.run(["-c", "import os, hetjax; os.environ['LEFT'] = hetjax.left = '1'"], tmp_path)
    left = "import os, hetjax; print(hasattr(hetjax, 'left'), 'LEFT' in os.environ)"
    assert programs.run(["-c", left], tmp_path).stdout == "False False\n"
