"""`mpirun` starts the processes, and nothing but the command says so."""

import os
import signal

import pytest

from tests.engines import jobs
from tests.engines.jobs import TRAIN

pytestmark = pytest.mark.engines
COMMAND = ("mpirun", "-n", "4")


@pytest.fixture
def job(tmp_path, open_mpi):
    return jobs.Job(tmp_path, open_mpi)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, open_mpi):
    job = jobs.Job(tmp_path_factory.mktemp("undisturbed"), open_mpi)
    job.run(*COMMAND, *TRAIN)
    return job


def test_mpirun_starts_all_processes_of_a_run(undisturbed):
    jobs.check_whole(undisturbed)


@pytest.mark.parametrize("to", ["a rank", "mpirun"])
def test_after_kill_9_of_a_rank_and_sigterm_to_mpirun_the_same_command_goes_on(
    to, job, undisturbed
):
    with job.start(*COMMAND, *TRAIN) as run:
        pids = run.wait_for_round(jobs.KILL_AT)
        os.kill(pids[0], signal.SIGKILL) if to == "a rank" else run.send(signal.SIGTERM)
        code = run.end()
        assert code == 128 + signal.SIGKILL if to == "a rank" else code != 0
    job.run(*COMMAND, *TRAIN)
    jobs.check_equal(job, undisturbed)


def test_a_script_that_joins_needs_nothing_more(job):
    job.run(*COMMAND, "python", "script.py")
    jobs.check_script(job, 4)
