"""Checkpoint files: finding, reading, mapping names, loading."""
