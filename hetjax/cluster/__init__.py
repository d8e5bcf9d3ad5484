"""The cluster that a run has, or plays: emulated speeds, processes, and their supervision."""
