"""What a real process says of itself, and what is read of it."""

import os
import threading
import time
import zlib

import pytest

from hetjax.liveness import heartbeats
from tests.launcher import launches


@pytest.fixture
def environ(tmp_path):
    own = {"BEACONS": str(tmp_path), "PROCESS_ID": "2", "HEARTBEAT_SECS": "0.2"}
    return {f"HETJAX_{name}": value for name, value in own.items()}


def test_what_threads_say_is_read(environ, tmp_path):
    beacon = heartbeats.start(environ)
    try:
        beacon.at("waiting", 4)

        def work(worker):
            for index in range(200):
                beacon.at("computing", index, worker)
            beacon.at("loading", 200, worker)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in (5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        launches.eventually(lambda: getattr(heartbeats.read(tmp_path, 2), "alive", 0) > began)
        snapshot = heartbeats.read(tmp_path, 2)
    finally:
        beacon.close()
    assert snapshot.pid == os.getpid()
    entries = {entry.worker: entry for entry in snapshot.entries}
    assert (entries[None].phase, entries[None].round_index) == ("waiting", 4)
    for worker in (5, 6):
        assert (entries[worker].phase, entries[worker].round_index) == ("loading", 200)
        assert entries[worker].since <= began
    assert heartbeats.read(tmp_path, 2).closed
    beacon.close()  # once more does no harm


def test_the_first_word_is_written_at_once(environ, tmp_path):
    beacon = heartbeats.start({**environ, "HETJAX_HEARTBEAT_SECS": "1000"})
    try:
        beacon.at("starting")
        launches.eventually(lambda: (snapshot := heartbeats.read(tmp_path, 2)) and snapshot.entries)
        beacon.at("computing", 0)
        assert heartbeats.any_round(tmp_path)  # what ends now has begun
    finally:
        beacon.close()


def place(content, *, num_bytes=None):
    """One of the two places of a file, with a sum that fits the content."""
    data = content.encode("latin-1")
    size = len(data) if num_bytes is None else num_bytes
    return b"%08x%08x" % (zlib.crc32(data), size) + data


GOOD = '{"pid": 7, "alive": %f, "closed": false, "entries": []}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD.encode() % 5,
        place(GOOD % 5, num_bytes=10),
        place(GOOD % 5).replace(b"7", b"8"),
        *map(place, ["{", "[]", '{"pid": 1}']),
    ],
)
def test_what_cannot_be_read_counts_as_not_said(data, tmp_path):
    file = tmp_path / "process-0.beacon"
    file.write_bytes(place(GOOD % 5))
    assert heartbeats.read(tmp_path, 0).alive == 5
    file.write_bytes(data)
    assert heartbeats.read(tmp_path, 0) is None
    assert heartbeats.read(tmp_path, 1) is None


@pytest.mark.parametrize("half_written", [0, 1])
def test_while_one_place_is_written_the_other_is_read(half_written, environ, tmp_path):
    beacon = heartbeats.start(environ)
    beacon.close()
    before = heartbeats.read(tmp_path, 2).alive
    with open(tmp_path / "process-2.beacon", "r+b") as file:
        file.seek(half_written * (1 << 20))
        file.write(place(GOOD % (before + 1))[:-1])
    assert heartbeats.read(tmp_path, 2).alive <= before
    assert heartbeats.read(tmp_path, 2).pid == os.getpid()
