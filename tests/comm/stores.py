"""Values that the processes of a test see, in place of JAX's coordination service."""

import asyncio

from hetjax.comm import carrier, referee_host


def client():
    """The same for all processes of the test."""
    host = referee_host.RefereeHost(10.0, 600.0)
    return carrier.HostStore(lambda method, *args: asyncio.run(getattr(host, method)(*args)))
