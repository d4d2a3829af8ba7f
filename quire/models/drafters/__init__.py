"""Heads that draft for a model: one file per kind, found by name."""
