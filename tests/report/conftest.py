"""Pages that several tests read, each drawn once."""

import pytest

from tests.report import runs

RUNS = {  # (rounds, workers, summary): every kind of timeline and of quota picture
    "one round": (1, 16, runs.SUMMARY),
    "one worker": (7, 1, {}),
    "eight workers": (7, 8, runs.SUMMARY),
    "many workers": (7, 64, {}),
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The page of each of `RUNS`."""
    return {
        name: runs.write(
            tmp_path_factory.mktemp("page"),
            summary=summary,
            history=runs.make_history(num_rounds, num_workers, rounds_per_epoch=7),
        )
        for name, (num_rounds, num_workers, summary) in RUNS.items()
    }
