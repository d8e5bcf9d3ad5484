"""On which machines processes are, and whether all can be reached."""

import pytest

from hetjax.comm import hosts as hosts_lib

A, B, C = "machine a", "machine b", "machine c"


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
    named = dict(enumerate(hosts_lib.Host(name, name[-1], address) for name, address in hosts))
    said = hosts_lib.unreachable(named)
    assert bool(said) == (process is not None)
    if process is not None:
        name, address = named[process][1:3]
        assert f"process {process} is on {name}, whose own name resolves to {address} there" in said
