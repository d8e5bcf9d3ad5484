"""Programs that disturb: `faults`, `checkpoints`, `mutants`; `checkouts` compares two versions."""
