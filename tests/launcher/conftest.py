"""Launchers that a test starts end with it."""

import signal

import pytest

from tests.launcher import launches


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(program, *flags, **options):
        started.append(launches.Launch(tmp_path, program, *flags, **options))
        return started[-1]

    yield start
    for one in started:
        try:
            if one.running:
                one.send(signal.SIGKILL)
                one.end()
        finally:
            print(one.text())  # pytest shows it where the test failed, however it did
