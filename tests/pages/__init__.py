"""The README and every page under `docs/`: their blocks, commands, links and tables."""
