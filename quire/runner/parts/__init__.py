"""Parts: data that a feature sends with a step; one file per feature, found by name."""
