"""Who has come to join, and whether all can be reached."""

import time

import pytest

from hetjax.processes import arrivals, join

A, B, C = "machine a", "machine b", "machine c"


def met(process_id, num_processes, port):
    one = arrivals.Arrivals(process_id, num_processes)
    assert one.meet(f"localhost:{port}") == ""
    return one


def test_all_that_are_there_hear_who_is_not():
    port = join.find_port("127.0.0.1")
    gang = [met(index, 4, port) for index in (1, 0, 2)]
    assert [one.missing() for one in gang] == [None] * 3
    deadline = time.monotonic() + 60
    while any(one.missing() != {3} for one in gang) and time.monotonic() < deadline:
        for one in gang:
            one.turn()
        time.sleep(0.01)
    assert [one.missing() for one in gang] == [{3}] * 3
    for one in gang:
        one.close()


def test_what_nobody_of_the_run_sends_is_passed_over():
    port = join.find_port("127.0.0.1")
    zero, stranger = met(0, 3, port), met(1, 3, port)
    for sent in (b"", b"-1", b"9", b"GET / HTTP/1.1", b"\xff\xfe"):
        stranger._socket.send(sent)
    stranger._socket.send(b"1")
    deadline = time.monotonic() + 60
    while zero.missing() is None and time.monotonic() < deadline:
        zero.turn()
    assert zero.missing() == {2}
    zero.close()
    stranger.close()


@pytest.mark.parametrize(
    ("hosts", "process"),
    [
        ([(A, "127.0.1.1"), (A, "127.0.1.1")], None),  # of one machine
        ([(A, "127.0.1.1"), (B, "127.0.1.1")], 0),
        ([(A, "10.0.0.1"), (B, "127.0.1.1")], None),  # which connects to the other
        ([(A, "10.0.0.1"), (B, "127.0.1.1"), (C, "")], 1),
        ([(A, "fd00::1"), (B, "::1")], 1),
    ],
)
def test_a_machine_whose_name_is_a_loopback_address_is_named(hosts, process):
    named = {
        index: arrivals.Host(machine, machine[-1], address)
        for index, (machine, address) in enumerate(hosts)
    }
    said = arrivals.unreachable(named)
    if process is None:
        assert said == ""
    else:
        name, address = hosts[process][0][-1], hosts[process][1]
        assert f"process {process} is on {name}, whose own name resolves to {address} there" in said
