"""Ops that are launched later than they are called, so that neighbours can become one kernel."""

from __future__ import annotations


def flush() -> None:
    """Launch what is pending. Before anything but an op reads what an op returned."""
