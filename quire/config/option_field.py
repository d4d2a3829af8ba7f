"""Fields of options: a default, and the range of values."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def option(
    default: T,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    parse: str | None = None,
    short: str | None = None,
    alias: str | None = None,
) -> T:
    """A field with a range. low, high: inclusive; above: exclusive. parse: "count" or "bytes"."""
    meta = {
        "low": low,
        "above": above,
        "high": high,
        "parse": parse,
        "short": short,
        "alias": alias,
    }
    return field(default=default, metadata=meta)
