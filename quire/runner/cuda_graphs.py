"""Decode steps replayed from CUDA graphs: one launch in place of hundreds.

A decode-only step is run at one of a few sizes. The first step of a size runs kernel by kernel,
which loads and compiles what it needs; the second is captured, while the GPU is busy with the step
before it, and replayed; or a step runs in a somewhat larger graph that is there already.
All graphs share one memory pool, which they may because one stream runs them one after another.
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from quire.kernels import fuse
from quire.sampling.sampler import Kind

log = logging.getLogger(__name__)

STRETCH = 1.25
"""A graph of at most this many times the rows serves for the time being."""

Key = tuple[int, Kind | None]
"""The size of a step, and how its rows are sampled; None: not in the graph."""

PATIENCE = 4
"""So many steps, after which a size of its own is captured."""


class Graphs:
    """The graphs of one kind of step each: (size, kind) -> graph."""

    def __init__(
        self, body: Callable[[int, Kind | None], None], max_rows: int, *, eager: bool
    ) -> None:
        """body(size, kind): launch a step of `size` rows. eager: never capture."""
        self._body = body
        self._eager = eager
        self._sizes = sizes(max_rows)
        self._made: dict[Key, torch.cuda.CUDAGraph] = {}
        self._seen: Counter[Key] = Counter()
        self._pool: Any = None  # torch's handle of their memory
        self.capturing = False

    def size_for(self, rows: int, kind: Kind | None) -> int:
        """At how many rows a step of `rows` is to be run now."""
        if self._eager:
            return rows
        size = self._sizes[bisect_left(self._sizes, rows)]
        if (size, kind) in self._made or self._seen[size, kind] >= PATIENCE:
            return size
        limit = max(rows * STRETCH, rows + 1)
        larger = [s for s, k in self._made if k == kind and size < s <= limit]
        if not larger:
            return size
        self._seen[size, kind] += 1
        return min(larger)

    def run(self, size: int, kind: Kind | None) -> None:
        """Launch a step of a size that size_for() gave."""
        key = (size, kind)
        graph = self._made.get(key)
        if graph is None and not self._eager:
            self._seen[key] += 1
            if self._seen[key] > 1:
                graph = self._capture(key)
            elif self._runs_through(key):
                return
        if graph is None:
            self._body(size, kind)
        else:
            graph.replay()

    def _runs_through(self, key: Key) -> bool:
        """Run the body as a graph could. False: it waits for the device, and runs eagerly for ever.

        Torch raises where an operation would wait, which no graph can repeat.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode may miss something
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._body(*key)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            log.info("decode steps run without CUDA graphs: %s", error)
            fuse.drop()
            self._eager = True
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return True

    def capture(self, size: int, kind: Kind | None) -> None:
        """Make a graph ahead of need. The body must have run at this size."""
        if (size, kind) not in self._made:
            self._capture((size, kind))

    def set_aside(self, pieces: int, size: int) -> None:
        """Put free pieces of `size` bytes into the pool of the graphs there are, for later ones."""
        if self._pool is None:
            return
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="relaxed")
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(pieces)]
        held[0].zero_()  # torch warns of graphs that do nothing
        graph.capture_end()

    def forget(self) -> None:
        """Drop all graphs: what they refer to has moved."""
        self._made.clear()
        self._seen.clear()
        self._pool = None

    def _capture(self, key: Key) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # "relaxed": other threads of this process may use the device meanwhile
        graph.capture_begin(self._pool, capture_error_mode="relaxed")
        self.capturing = True
        try:
            self._body(*key)
        finally:
            self.capturing = False
            graph.capture_end()
        self._made[key] = graph
        return graph


def sizes(max_rows: int) -> list[int]:
    """The numbers of rows that steps are run at, up to and with the largest step's."""
    found = [1, 2, 3, 4, 6, 8, 12, 16]
    for start, stop, grain in ((16, 64, 8), (64, 256, 16), (256, 512, 32), (512, 1 << 20, 64)):
        found += range(start + grain, min(stop, max_rows) + 1, grain)
    return [*(size for size in found if size < max_rows), max_rows]
