"""Reasoning formats: one file per model family."""
