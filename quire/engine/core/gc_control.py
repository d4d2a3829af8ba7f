"""Garbage collection: runs rarely while steps are made.

A step makes and drops thousands of small objects, which counts as growth and triggers full
collections; with a thousand prompts in memory each of them traverses millions of token ids.
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
    """Freeze the objects of start-up: no collection needs to traverse them again."""
    gc.collect()  # first: garbage of now would otherwise never be freed
    gc.freeze()


def disable_full_gc() -> None:
    """Freeze, and run full collections only in collect(). For a process that runs steps."""
    freeze_gc_heap()
    first, second, _ = gc.get_threshold()
    if first:  # 0: it is switched off
        gc.set_threshold(max(first, GC_THRESHOLD), second, FULL_GC_NEVER)


def raise_gc_threshold() -> None:
    """Freeze, and collect less often. For a process that serves without pauses of its own."""
    freeze_gc_heap()
    first, *rest = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, GC_THRESHOLD), *rest)


def collect_garbage() -> None:
    """Run a full collection, while there is time."""
    gc.collect()
