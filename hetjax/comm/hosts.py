"""On which machine does each process run, and can all be reached?"""

import contextlib
import ipaddress
import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetjax.comm import gpus

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Host(NamedTuple):
    """Where a process runs, as it tells the others."""

    machine: str  # the same for processes that reach each other at 127.0.0.1
    name: str
    address: str  # what its name resolves to on that machine; "": nothing
    gpus: Sequence[str] = ()  # the bus ids of those that it sees


def address_of(coordinator: str) -> tuple[str, int]:
    """The host of HOST:PORT, without the brackets of IPv6, and the port."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def own_host() -> Host:
    """Where this process runs."""
    name, machine, address = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):  # only Linux has them
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/net')}"
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return Host(machine or name, name, address, gpus.visible())


def unreachable(hosts: Mapping[int, Host]) -> str:
    """Says which process other machines cannot reach at the address of its own name; or "".

    Of two processes the one with the higher address connects to the other one.

    Args:
        hosts: of all processes.

    Example:
        >>> unreachable({0: Host("m", "a", "192.168.0.1"), 1: Host("n", "b", "127.0.1.1")})[:55]
        'process 1 is on b, whose own name resolves to 127.0.1.1'
    """
    for own, host in hosts.items():
        if not host.address or not (address := ipaddress.ip_address(host.address)).is_loopback:
            continue
        for there in hosts.values():
            is_met = there.address and ipaddress.ip_address(there.address).packed < address.packed
            if there.machine != host.machine and not is_met:
                return (
                    f"process {own} is on {host.name}, whose own name resolves to {host.address} "
                    f"there; write the address that {there.name} knows into its /etc/hosts"
                )
    return ""
