"""What a caller of the simulator can get wrong, and its command line."""

import re

import pytest

from hetjax import quota, simulate, topology
from hetjax.cluster import emulate
from hetjax.topology import gossip, graphs, links
from tests.launcher import launches

MANY = emulate.EmulatedCluster((1.0,) * 5000)
OF_FIVE = topology.gossiping(lambda facts: gossip.d_psgd(graphs.ring(5)), before_update=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quota": "adaptiv"}, "quota.policy: got 'adaptiv'.*Did you mean 'adaptive'"),
        ({"gate": "quorum"}, "gate.quorum: got 0, must be from 1 to budget=8"),
        ({"wait_for": "neighbours"}, "'neighbours' does not go with 'all_reduce'"),
        (
            {"wait_for": "neighbours", "reducer": "d_psgd", "gate": "first"},
            "does not go with 'first'.*news from every worker",
        ),
        ({"reducer": OF_FIVE}, "schedule has 5 workers and the cluster 4"),
        ({"reducer": topology.d_psgd(graph=graphs.ring(5))}, "has 5 workers and the cluster 4"),
        ({"reducer": topology.all_reduce()._replace(network=None)}, "has no network"),
        ({"budget": 0}, "budget: got 0"),
        ({"caps": [8, 8]}, r"caps are int64\[2\]"),
        ({"param_bytes": -1}, "param_bytes: got -1"),
        ({"cluster": {"delays": 1}}, "a field of cluster: got 'delays'.* Did you mean 'delay'"),
        ({"cluster": {"num_workers": 4}}, "no secs_per_microbatch"),
        ({"cluster": MANY, "reducer": "matcha"}, "at most 1000 workers"),
        ({"cluster": MANY, "reducer": topology.d_psgd(graph="complete")}, "is of at most"),
        ({"cluster": MANY, "budget": 40_000, "quota": quota.static([1] + [0] * 4999)}, "Give caps"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(options, message):
    cluster = emulate.EmulatedCluster((1.0,) * 4)
    given = {"quota": quota.equal(), "cluster": cluster, "budget": 8, "num_rounds": 2, **options}
    with pytest.raises(ValueError, match=message):
        simulate.simulate(**given)


def test_a_cluster_may_be_the_fields_that_fit_takes():
    change = {"round": 2, "worker": 0, "secs_per_microbatch": 3.0}
    made = emulate.EmulatedCluster(
        (1.0, 2.0), delay="gamma", changes=(emulate.Change(**change),), seed=3
    )
    fields = {"secs_per_microbatch": (1.0, 2.0), "delay": "gamma", "seed": 3, "num_workers": 2}
    fields |= {"clock": "virtual", "changes": (change,)}
    expected = simulate.simulate("equal", made, budget=8, num_rounds=4)
    found = simulate.simulate("equal", fields, budget=8, num_rounds=4)
    assert found.round_secs.tolist() == expected.round_secs.tolist()


def test_a_wrong_link_is_refused():
    with pytest.raises(ValueError, match="latency_secs: got -1"):
        links.LinkModel(-1.0, 1.0)


PROGRAM = """
import os, sys
from experiments import command_line, simulate
os.chdir(sys.argv.pop(1))
try:
    command_line.run(simulate.main)
finally:
    print('jax' in sys.modules, file=sys.stderr)
"""
FLAGS = ["--workers=4,80", "--rounds=5", "--policies=equal,adaptive", "--gates=none,first"]


@pytest.mark.parametrize("picture", [(), ("--picture=new/simulated.png",)])
def test_the_program_prints_a_table_and_draws_a_picture_if_asked_without_jax(picture, tmp_path):
    flags = [*FLAGS, "--reducers=all_reduce,d_psgd", *picture]
    done = launches.python(PROGRAM, tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 * 2 * 2 * 2
    blocking = [line for line in lines if "| equal | none |" in line]
    assert len(blocking) == 4
    assert all(line.endswith("| 1.00 |") for line in blocking)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.stat().st_size > 10_000 for path in written] == [True] * len(picture)
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--workers=8,x", "--workers.*'x'.*such as --workers=8,64"),
        ("--wait_for=neighbours", "--wait_for=neighbours.*--reducers=d_psgd"),
        ("--picture=a.b --workers=4 --rounds=1", r"--picture=a\.b cannot be written: .*'b'"),
    ],
)
def test_the_program_says_what_flags_would_work(flag, message, tmp_path):
    done = launches.python(PROGRAM, tmp_path, *flag.split())
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr
