"""Several processes read streams and augmented sources as one does."""

import numpy as np
import pytest

from tests.rounds import gangs, stream_processes


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Each reads the whole stream. To 1e-6: sums are added up in another order."""
    found = gangs.run("tests.rounds.stream_processes", 2, tmp_path, str(tmp_path))
    for code, said in found:
        assert code, said  # by the last case
    assert "process 1 has another first example of the stream" in found[1][1]
    for name, (source, by) in stream_processes.cases().items():
        alone, together = stream_processes.fit(source, by), np.load(tmp_path / f"{name}.npz")
        params = alone.params["w"] if isinstance(alone.params, dict) else alone.params
        np.testing.assert_allclose(together["params"], params, rtol=1e-6, atol=1e-6)
        assert together["done"] == alone.summary["examples_processed"]
