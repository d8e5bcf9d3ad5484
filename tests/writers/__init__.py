"""The trackers, read back by their own readers."""
