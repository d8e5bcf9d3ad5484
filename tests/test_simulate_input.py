"""What a caller of the simulator can get wrong, and its command line."""

import re
import subprocess
import sys

import pytest

from hetjax import quota, simulate, topology
from hetjax.cluster import emulate
from hetjax.topology import gossip, graphs, links


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quota": "adaptiv"}, "quota.policy: got 'adaptiv'.*Did you mean 'adaptive'"),
        ({"quota": {"policy": quota.equal(), "band": 0.5}}, "made already"),
        ({"quota": {"policy": "static", "band": 0.5}}, "static' has no .*one of 'dead_band'"),
        ({"gate": "frist"}, "gate.trigger: got 'frist'.*Did you mean 'first'"),
        ({"gate": "quorum"}, "gate.quorum: got 0, must be from 1 to budget=8"),
        ({"gate": "deadline"}, "gate.deadline_secs: got 0.0"),
        ({"reducer": "gossip"}, "all_reduce, ring, d_psgd, matcha"),
        ({"wait_for": "everybody"}, "all, neighbours"),
        ({"wait_for": "neighbours"}, "reducer='all_reduce'.*take d_psgd"),
        (
            {"wait_for": "neighbours", "reducer": "d_psgd", "gate": "first"},
            "gate='first'.*news from every worker; take gate='deadline'",
        ),
        ({"reducer": topology.matcha(graph="one_peer_exponential")}, "directed phases"),
        (
            {
                "reducer": topology.gossiping(
                    lambda facts: gossip.d_psgd(graphs.ring(5)), before_update=True
                )
            },
            "schedule has 5 workers and the cluster 4",
        ),
        ({"reducer": topology.d_psgd(graph=graphs.ring(5))}, "has 5 workers and the cluster 4"),
        ({"reducer": topology.d_psgd(graph="rong")}, "Did you mean 'ring'"),
        (
            {"reducer": topology.all_reduce()._replace(network=None)},
            "does not say what it costs on links",
        ),
        ({"budget": 0}, "budget is 0"),
        ({"num_rounds": 1.5}, "num_rounds is 1.5"),
        ({"caps": [8, 8]}, "caps have shape"),
        ({"caps": [1, 1, 1, 1]}, "hold only 4"),
        ({"param_bytes": -1}, "param_bytes is -1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(options, message):
    given = {"quota": quota.equal(), "budget": 8, "num_rounds": 2, **options}
    with pytest.raises(ValueError, match=message):
        simulate.simulate(given.pop("quota"), emulate.EmulatedCluster((1.0,) * 4), **given)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"secs_per_microbatch": (1.0,), "delays": 1}, "'delays'.*Did you mean 'delay'"),
        ({"num_workers": 4}, "no secs_per_microbatch; give"),
    ],
)
def test_wrong_fields_of_a_cluster_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        simulate.simulate("equal", fields, budget=8, num_rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": "matcha"}, "at most 1000 workers, not 5000; take d_psgd"),
        ({"reducer": topology.d_psgd(graph="complete")}, "12497500 links.*all_reduce"),
        ({"quota": quota.static([1] + [0] * 4999)}, "Give caps"),
    ],
)
def test_what_takes_too_much_memory_is_refused(options, message):
    given = {"quota": "equal", "budget": 40_000, "num_rounds": 1, **options}
    with pytest.raises(ValueError, match=message):
        simulate.simulate(given.pop("quota"), emulate.EmulatedCluster((1.0,) * 5000), **given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [((-1.0, 1.0), "latency_secs is -1"), ((0.0, 0.0), "bytes_per_sec is 0.0")],
)
def test_a_wrong_link_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        links.LinkModel(*fields)


def run_program(*flags):
    code = (
        "import sys\n"
        "from absl import app\n"
        "from experiments import simulate\n"
        f"sys.argv = ['simulate', *{flags!r}]\n"
        "try:\n"
        "    app.run(simulate.main)\n"
        "finally:\n"
        "    print('jax' in sys.modules, file=sys.stderr)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_program_prints_a_table_and_draws_a_picture_without_jax(tmp_path):
    done = run_program(
        "--workers=4,80",
        "--rounds=5",
        "--policies=equal,adaptive",
        "--gates=none,first",
        "--reducers=all_reduce,d_psgd",
        f"--directory={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 * 2 * 2 * 2
    blocking = [line for line in lines if "| equal | none |" in line]
    assert len(blocking) == 4
    assert all(line.endswith("| 1.00 |") for line in blocking)
    assert (tmp_path / "simulate.png").stat().st_size > 10_000
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--workers=8,x", "--workers.*'x'.*such as --workers=8,64"),
        ("--policies=equl", "--policies.*'equl'.*equal, static"),
        ("--gates=last", "--gates.*none, first, quorum, deadline"),
        ("--speeds=1,0", "--speeds.*above 0"),
        ("--wait_for=neighbours", "--wait_for=neighbours.*--reducers=d_psgd"),
        ("--reducers=matcha", "1000 workers.*--workers=8,64,1000"),
    ],
)
def test_the_program_says_what_flags_would_work(flag, message):
    done = run_program(flag)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr
