"""Launchers that a test starts end with it."""

import signal

import pytest

from tests.launcher import launches


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(program, *flags):
        started.append(launches.Launch(tmp_path, program, *flags))
        return started[-1]

    yield start
    for one in started:
        if one.running:
            one.send(signal.SIGKILL)
            one.end()
