"""Programs that disturb: `faults`, `checkpoints`; and `checkouts`, which compares two versions."""
