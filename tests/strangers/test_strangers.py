"""The whole programs that pages link to run as they stand."""

import pathlib

import pytest

from tests import programs
from tests.strangers import conftest

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
PROGRAMS = [path for path in sorted(HERE.glob("*.py")) if path.name not in conftest.NO_PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_as_it_stands(path, tmp_path):
    for name in ("configs", "experiments"):  # as from a checkout
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "net.py").symlink_to(HERE / "net.py")
    (tmp_path / "program.py").write_text(path.read_text())
    ran = programs.run(["program.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
