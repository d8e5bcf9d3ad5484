"""The engines, where this machine has them; a test of another one is skipped with the reason."""

import os
import shutil

import pytest

from experiments.drills import engine_gangs, engine_slurm

os.environ.update(RAY_worker_niceness="0")  # of 15 a busy machine leaves them next to nothing


def _need(packages, *programs):
    if missing := [name for name in programs if not shutil.which(name)]:
        pytest.skip(f"there is no {', '.join(missing)} here; Debian has it in {packages}")


@pytest.fixture(scope="session")
def open_mpi():
    """The environment in which `mpirun` works here."""
    _need("openmpi-bin", "mpirun")
    return engine_gangs.OPEN_MPI


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of two nodes, for as long as the tests run."""
    _need("slurmctld, slurmd, slurm-client", *engine_slurm.PROGRAMS)
    with engine_slurm.Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
