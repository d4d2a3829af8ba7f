"""How weights are stored and multiplied: one file per method, found by its name."""
