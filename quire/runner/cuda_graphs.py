"""Steps replayed from CUDA graphs: one launch in place of hundreds.

A decode-only step is run at one of a few sizes, one with prompts in one of a few shapes
(quire.runner.mixed). The very first of a kind runs kernel by kernel, to
see whether anything in it waits for the device; then a size is captured when it is first needed and
replayed from then on. Capturing takes the host as long as launching, so it costs nothing while the
GPU is busy for longer than that; else a somewhat larger graph that is there serves for a while.
All graphs share one memory pool, which they may because one stream runs them one after another.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.kernels import fuse
from quire.sampling.sampler import Kind

log = logging.getLogger(__name__)

STRETCH = 1.25
"""A graph of at most this many times the rows serves for the time being."""

PATIENCE = 24
"""So many steps, after which a size of its own is captured."""

TRIES = 3
"""So many captures may fail before no more are tried."""

Key = tuple[Any, Kind | None]
"""The size of a step, and how its rows are sampled; None: not in the graph."""


class Pool:
    """The memory that the graphs of one stream share."""

    def __init__(self) -> None:
        self.handle: Any = None  # torch's

    def ready(self) -> Any:
        """The handle, made when it is first needed."""
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle


class Graphs:
    """The graphs of one kind of step each: (size, kind) -> graph."""

    def __init__(
        self,
        body: Callable[[Any, Kind | None], None],
        max_rows: int,
        *,
        eager: bool,
        pool: Pool | None = None,
    ) -> None:
        """body(size, kind): launch a step of `size` rows. eager: never capture."""
        self._body = body
        self._eager = eager
        self._sizes = sizes(max_rows)
        self.pool = pool or Pool()
        self._made: dict[Key, torch.cuda.CUDAGraph] = {}
        self._missed: Counter[Key] = Counter()
        self._proven: set[Kind | None] = set()  # kinds whose bodies never wait
        self._cost = 0.02  # seconds the last capture took
        self._failures = 0
        self.capturing = False

    def size_for(self, rows: int, kind: Kind | None, spare: float = 0.0) -> int:
        """At how many rows a step of `rows` is to be run now.

        spare: seconds for which the GPU has work to do.
        """
        if self._eager:
            return rows
        size = self._sizes[bisect_left(self._sizes, rows)]
        if (size, kind) in self._made or spare > self._cost:
            return size
        limit = max(rows * STRETCH, rows + 1)
        larger = [s for s, k in self._made if k == kind and size < s <= limit]
        self._missed[size, kind] += 1
        if not larger or self._missed[size, kind] > PATIENCE:
            return size
        return min(larger)

    def worth(
        self, size: Hashable, kind: Kind | None, spare: float, patience: int, most: int
    ) -> bool:
        """Whether a step of this size is to be run here: as a graph, now or after this capture.

        False: it has come fewer than `patience` times and the GPU has no work for so long; or there
        are `most` graphs. spare: seconds for which the GPU has work to do.
        """
        key = (size, kind)
        if self._eager or key in self._made:
            return not self._eager
        self._missed[key] += 1
        waited = self._missed[key] >= patience or spare > self._cost
        return waited and len(self._made) < most

    def run(self, size: Hashable, kind: Kind | None) -> None:
        """Launch a step of a size that size_for() gave, or worth() let through."""
        graph = self._made.get((size, kind))
        if graph is None and not self._eager:
            if kind not in self._proven:
                self._prove(size, kind)
                return
            graph = self._capture((size, kind))
        if graph is None:
            self._body(size, kind)
        else:
            graph.replay()

    def _prove(self, size: Hashable, kind: Kind | None) -> None:
        """Run the body as a graph could. If it waits for the device, all run eagerly for ever.

        Torch raises where an operation would wait, which no graph can repeat.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode may miss something
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._body(size, kind)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self._give_up(error)
        else:
            self._proven.add(kind)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        if self._eager:
            self._body(size, kind)

    def _give_up(self, error: Exception) -> None:
        log.warning("such steps run without CUDA graphs from now on: %s", error)
        fuse.drop()
        self._eager = True

    def set_aside(self, pieces: int, size: int) -> None:
        """Put free pieces of `size` bytes into the pool of the graphs there are, for later ones."""
        if self.pool.handle is None:
            return
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool.handle, capture_error_mode="relaxed")
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(pieces)]
        held[0].zero_()  # torch warns of graphs that do nothing
        graph.capture_end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, steps run kernel by kernel: what they run is not what later ones will."""
        before, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = before

    def forget(self) -> None:
        """Drop all graphs: what they refer to has moved."""
        self._made.clear()
        self._missed.clear()
        self.pool.handle = None

    def _capture(self, key: Key) -> torch.cuda.CUDAGraph | None:
        """The graph; None if there can be none."""
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self.capturing = True
        try:
            # "relaxed": other threads of this process may use the device meanwhile
            graph.capture_begin(self.pool.ready(), capture_error_mode="relaxed")
            try:
                self._body(*key)
            finally:
                self.capturing = False
                graph.capture_end()
        except RuntimeError as error:
            fuse.drop()
            self._failures += 1
            log.debug("capture of %s failed", key, exc_info=True)
            if self._failures >= TRIES:
                self._give_up(error)
            return None  # running it loads what the capture may have lacked
        self._made[key] = graph
        self._cost = time.perf_counter() - began
        return graph


def sizes(max_rows: int) -> list[int]:
    """The numbers of rows that steps are run at, up to and with the largest step's.

    Four to each doubling, once there are many: the library's tiles pad a product as far anyway, and
    each size costs a capture.
    """
    found = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    grain = 16
    while found[-1] < max_rows:
        found += [found[-1] + grain * i for i in range(1, 5)]
        grain *= 2
    return [*(size for size in found if size < max_rows), max_rows]


def roomy(rows: int, max_rows: int) -> int:
    """At how many rows so many are sampled outside graphs: few numbers, for few kernels to load."""
    return min(1 << (rows - 1).bit_length(), max_rows) if rows else 0
