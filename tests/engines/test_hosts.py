"""Two hosts of two processes each, started by hand: network namespaces of this machine."""

import functools
import signal

import jax
import numpy as np
import pytest

import hetjax
from experiments.drills import engine_gangs
from hetjax.checkpoints import checkpoint
from hetjax.rounds import resume
from tests.engines import hosts as hosts_lib
from tests.engines import jobs

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := hosts_lib.missing():
        pytest.skip(why)
    with hosts_lib.Hosts(tmp_path_factory.mktemp("hosts"), "1gbit") as made:
        yield made


def started(job, hosts, *options):
    return hosts_lib.ByHand([*jobs.TRAIN, *options], job, hosts)


def run(job, hosts, *options):
    with started(job, hosts, *options) as processes:
        assert processes.end() == [0] * engine_gangs.NUM_WORKERS, job.said


@pytest.fixture
def job(tmp_path):
    return jobs.Job(tmp_path, {})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, hosts):
    job = jobs.Job(tmp_path_factory.mktemp("undisturbed"), {})
    run(job, hosts)
    return job


def test_two_hosts_train_exactly_once_to_what_one_host_comes_to(undisturbed, job):
    """Not to the bit: the sums of each host are added up first."""
    jobs.check_whole(undisturbed)
    run(job, None)
    jobs.check_whole(job)
    here, there = (hetjax.load(each.workdir) for each in (job, undisturbed))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(near, here.params, there.params)


@pytest.mark.parametrize("rank", [0, 3])
def test_after_kill_9_on_a_host_the_same_command_goes_on(rank, job, hosts, undisturbed):
    with started(job, hosts) as processes:
        processes.wait_for_round(jobs.KILL_AT)
        directory = job.workdir / resume.DIRECTORY
        engine_gangs.until(lambda: checkpoint.newest_about(directory) or processes.is_over)
        processes.kill([rank])
        codes = processes.end()
    assert codes[rank] == -signal.SIGKILL
    assert 0 not in codes, job.said
    run(job, hosts)
    assert job.resumed
    jobs.check_equal(job, undisturbed)


@pytest.mark.parametrize(("memory", "times"), [("on", 1.0), ("off", 1.5)])
def test_the_sums_of_a_host_cross_the_link_once(memory, times, job, hosts):
    """Through sockets alone half as much again: a ring of four processes crosses it twice."""
    job.environment["HETJAX_SHARED_MEMORY"] = memory
    before = hosts.bytes_sent()
    wide = ("--config.model.name=mlp", "--config.model.hidden=(512,512)")
    run(job, hosts, *wide, "--config.epochs=4")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(hetjax.load(job.workdir).params))
    for sent, earlier in zip(hosts.bytes_sent(), before, strict=True):
        # and what warms up, and what is told about each round
        assert (sent - earlier) / size == pytest.approx((20 + 2) * times, rel=0.2)
