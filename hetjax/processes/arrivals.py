"""Which processes have come to join, and can all be reached?

While JAX waits for all processes there is no board yet. So each process sends its number once a
second to the coordinator's port, by UDP. Process 0 hears them there and answers with the numbers
that it has not heard. A network that keeps UDP out makes the messages less exact, and nothing else.
"""

import contextlib
import ipaddress
import json
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hetjax.processes import gpus

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_BYTES = 1 << 15
_MOST_TOLD = 1000
_HEARD_SECS = 5.0  # a process that is not heard for longer counts as gone


class Host(NamedTuple):
    """Where a process runs, as it tells the others."""

    machine: str  # the same for processes that reach each other at 127.0.0.1
    name: str
    address: str  # what its name resolves to on that machine; "": nothing
    gpus: Sequence[str] = ()  # the bus ids of those that it sees


class Arrivals:
    """The arrivals as one process sends and hears them.

    Args:
        process_id: its number.
        num_processes: of the run.
    """

    def __init__(self, process_id: int, num_processes: int) -> None:
        self._process_id, self._num_processes = process_id, num_processes
        self._heard: dict[int, float] = {}  # when process 0 heard each, monotonic
        self._told: list[int] | None = None  # the numbers that process 0 has not heard
        self._socket: socket.socket | None = None

    @property
    def has_met(self) -> bool:
        """Whether the coordinator's address was found."""
        return self._socket is not None

    def meet(self, coordinator: str) -> str:
        """Finds the coordinator's address; says what is wrong with it, or "".

        Args:
            coordinator: host:port.
        """
        host, port = address_of(coordinator)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError as error:
            return f"cannot find the machine of the coordinator {coordinator}: {error.strerror}"
        family, kind, _, _, address = found[0]
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            if self._process_id:
                self._socket.connect(address)
            else:
                self._socket.bind(address if host in LOOPBACK else ("", port))
        return ""

    def turn(self) -> None:
        """Sends and hears; call it about once a second."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # nobody listens, or nothing more is there to hear
            if self._process_id:
                self._socket.send(b"%d" % self._process_id)
            while True:
                data, sender = self._socket.recvfrom(_MOST_BYTES)
                with contextlib.suppress(ValueError):
                    self._hears(self._socket, data, sender)

    def missing(self) -> set[int] | None:
        """The processes that process 0 has not heard; None where that is not known."""
        if self._process_id:
            return None if self._told is None else set(self._told)
        now = time.monotonic()
        heard = {other for other, at in self._heard.items() if now - at <= _HEARD_SECS}
        known = bool(heard) or self._num_processes == 2
        return set(range(1, self._num_processes)) - heard if known else None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _hears(self, listening: socket.socket, data: bytes, sender: Any) -> None:
        if self._process_id:
            self._told = [int(other) for other in json.loads(data)]
            return
        if 0 < (other := int(data)) < self._num_processes:
            self._heard[other] = time.monotonic()
            told = sorted(self.missing() or ())[:_MOST_TOLD]
            listening.sendto(json.dumps(told).encode(), sender)


def address_of(coordinator: str) -> tuple[str, int]:
    """The host of HOST:PORT, without the brackets of IPv6, and the port."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def own_host() -> Host:
    """Where this process runs."""
    name, machine, address = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):  # Linux alone has them
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
