"""Python's garbage collector, held back while steps are made.

A step makes and drops thousands of small objects, which counts as growth and brings on full
collections; with a thousand prompts in memory each of them looks at millions of token ids.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

GROWTH = 50_000
"""Objects more than before, after which young ones are looked at."""


@contextmanager
def seldom() -> Iterator[None]:
    """Within, collect after real growth only. Who collects more seldom already, or never, may."""
    first, *rest = gc.get_threshold()
    if not first or first >= GROWTH:
        yield
        return
    gc.set_threshold(GROWTH, *rest)
    try:
        yield
    finally:
        gc.set_threshold(first, *rest)
