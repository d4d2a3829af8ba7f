"""CPU worker, and tapes of decode steps."""
