"""Slurm starts the processes: `srun`, the batch script of the page, and mpirun inside a job."""

import os
import pathlib
import re
import signal

import pytest

from experiments.drills import engine_gangs
from tests.engines import jobs
from tests.engines.jobs import TRAIN
from tests.pages.blocks import ROOT, blocks

pytestmark = pytest.mark.engines
COMMAND = ("srun", "--ntasks=4", "--nodes=2", "--kill-on-bad-exit=1")
SCRIPT = dict(blocks(ROOT / "docs/schedulers.md", "sh"))["A Slurm job that survives"]


def made(directory, slurm):
    return jobs.Job(directory, {"SLURM_CONF": slurm.environment["SLURM_CONF"]})


@pytest.fixture
def job(tmp_path, slurm):
    job = made(tmp_path, slurm)
    (job.directory / "job.sh").write_text(SCRIPT)
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, slurm):
    job = made(tmp_path_factory.mktemp("undisturbed"), slurm)
    job.run(*COMMAND, *TRAIN)
    return job


@pytest.fixture
def submit(slurm, job):
    """Gives the batch script to Slurm; the job's id."""

    def submit(*options):
        script = job.directory / "job.sh"
        return slurm.submit(script, "--nodes=2", *options, environment=job.environment)

    return submit


def port_of(pid):
    environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    return int(re.search(rb"JAX_COORDINATOR_PORT=(\d+)", environment)[1])


def test_srun_starts_all_processes_of_a_run_on_two_nodes(undisturbed):
    jobs.check_whole(undisturbed)


def test_the_batch_script_starts_again_after_kill_9_at_another_port(
    slurm, job, submit, undisturbed
):
    number = submit()
    pids = engine_gangs.wait_for_round(job.workdir, jobs.KILL_AT)
    first = port_of(pids[1])
    os.kill(pids[0], signal.SIGKILL)
    known = set(pids.values())
    again = engine_gangs.until(lambda: set(engine_gangs.ranks(job.workdir).values()) - known)
    assert port_of(again.pop()) != first
    assert slurm.end_of(number) == "COMPLETED", job.said
    jobs.check_equal(job, undisturbed)


def test_the_batch_script_gives_up_after_three_attempts(slurm, job, submit):
    (job.directory / "configs/digits.py").write_text(
        "import os\n"
        "with open('ports', 'a') as file:\n"
        "    print(os.environ['JAX_COORDINATOR_PORT'], file=file, flush=True)\n"
        "raise ValueError('there is no configuration')\n"
    )
    number = submit()
    assert slurm.end_of(number) == "FAILED"
    ports = {int(port) for port in (job.directory / "ports").read_text().split()}
    assert len(ports) == 3
    assert all(61440 <= port < 65536 for port in ports)


def test_a_job_that_is_cancelled_goes_on_when_it_is_submitted_again(
    slurm, job, submit, undisturbed
):
    number = submit()
    engine_gangs.wait_for_round(job.workdir, jobs.KILL_AT)
    slurm.ask("scancel", number)
    assert slurm.end_of(number) == "CANCELLED"
    saved = job.summary
    assert saved["stopped_by"] == "SIGTERM"
    assert slurm.end_of(submit()) == "COMPLETED", job.said
    assert job.resumed == [saved["rounds"]]
    jobs.check_equal(job, undisturbed)


def test_a_job_that_is_requeued_goes_on(slurm, job, submit, undisturbed):
    number = submit()
    engine_gangs.wait_for_round(job.workdir, jobs.KILL_AT)
    slurm.ask("scontrol", "requeue", number)
    assert slurm.end_of(number) == "COMPLETED", job.said
    assert slurm.field(number, "Restarts") == "1"
    jobs.check_equal(job, undisturbed)


def test_a_heterogeneous_step_is_one_run(job, undisturbed):
    job.run("srun", "--ntasks=1", *TRAIN, ":", "--ntasks=3", *TRAIN)
    jobs.check_equal(job, undisturbed)


def test_mpirun_in_an_allocation_of_two_nodes_is_one_run(slurm, open_mpi, job, submit, undisturbed):
    line = " ".join(["mpirun", "-n", "4", "--map-by", "node", *TRAIN])
    (job.directory / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
    job.environment.update(open_mpi)
    assert slurm.end_of(submit("--ntasks=4")) == "COMPLETED", job.said
    jobs.check_equal(job, undisturbed)
