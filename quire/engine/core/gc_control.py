"""Garbage collection: runs rarely while steps are made.

A step makes and drops thousands of small objects, which counts as growth and brings on full
collections; with a thousand prompts in memory each of them looks at millions of token ids.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 50_000
"""New objects after which a young collection runs."""
FULL_GC_NEVER = 1 << 30


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Within, collect after real growth only. Keeps a higher threshold or a disabled collector."""
    first, *rest = gc.get_threshold()
    if not first or first >= GC_THRESHOLD:
        yield
        return
    gc.set_threshold(GC_THRESHOLD, *rest)
    try:
        yield
    finally:
        gc.set_threshold(first, *rest)


def freeze_gc_heap() -> None:
    """What start-up made stays: no collection need look at it again."""
    gc.collect()  # first: what is garbage now would stay for ever
    gc.freeze()


def disable_full_gc() -> None:
    """For a process that makes steps: freeze, and let full collections come by collect() alone."""
    freeze_gc_heap()
    first, second, _ = gc.get_threshold()
    if first:  # 0: it is switched off
        gc.set_threshold(max(first, GC_THRESHOLD), second, FULL_GC_NEVER)


def raise_gc_threshold() -> None:
    """For a process that serves and has no pause of its own: freeze, and collect more seldom."""
    freeze_gc_heap()
    first, *rest = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, GC_THRESHOLD), *rest)


def collect_garbage() -> None:
    """Look at everything, now that there is time."""
    gc.collect()
