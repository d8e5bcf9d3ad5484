"""The benchmark of hosts: what it makes of a run's records; `tests/engines` has real hosts."""

import pytest

from experiments.benchmarks import host_leftovers, hosts
from experiments.drills import engine_hosts


def _line(secs, **fields):
    line = {"full": True, "round_secs": secs, "local_secs": secs / 2, "exchange_secs": secs / 4}
    return line | fields


def test_medians_are_of_rounds_that_are_full():
    lines = [_line(1.0), _line(2.0), _line(9.0), _line(50.0, full=False)]
    assert hosts.of_lines(lines, 7.0) == (2.0, 1.0, 0.5, 7.0)
    with pytest.raises(ValueError, match="1 rounds were done, and none of them is full"):
        hosts.of_lines(lines[-1:])


def test_bytes_are_told_beside_the_time_that_they_take_at_the_rate():
    runs = [hosts.Measured(0.4, 0.1, 0.2, 2.5e6)] * 2
    told = "400 (400 to 400); 100 (100 to 100); 200 (200 to 200)"
    assert hosts.told(runs, None) == told
    assert hosts.told(runs[:1], 1e8) == "400; 100; 200; 2.50; 200"


def test_where_there_can_be_no_hosts_the_rows_say_why(monkeypatch):
    monkeypatch.setattr(engine_hosts, "missing", lambda: "namespaces need root")
    for rows in (hosts.hosts_rows(), host_leftovers.rows()):
        assert "namespaces need root" in rows[0].reached


def test_what_killed_runs_leave_is_counted_by_how_they_were_started(monkeypatch):
    monkeypatch.setattr(engine_hosts, "missing", lambda: "")

    def one(seed):
        in_tmp = ["hetjax-beacons-1"] if seed == 1 else []
        left = host_leftovers.Left(["sums"] * (seed == 0), in_tmp, [], ["@s"] * (seed < 2), seed)
        return host_leftovers.HOW[seed % 2], left

    monkeypatch.setattr(host_leftovers, "one", one)
    memory, rest, in_tmp = host_leftovers.rows(3)
    assert "in 2 of 3 when rounds had begun" in memory.figure
    assert memory.reached == "1 of 3"
    assert rest.reached == "0; 2"
    assert in_tmp.reached == (
        "the launcher, but for its guardian: 0 of 2; "
        "the launcher and its guardian: 1 of 1, hetjax-beacons-*"
    )
