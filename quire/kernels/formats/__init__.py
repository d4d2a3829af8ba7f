"""Memory layouts shared by ops: packed and FP8 weights, the sampling table."""
