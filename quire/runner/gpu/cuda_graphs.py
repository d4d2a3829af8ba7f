"""CUDA graph cache: replays steps from graphs, with one launch in place of hundreds.

A decode-only step runs at one of a few sizes, one with prompts in one of a few shapes
(quire.runner.gpu.mixed_batch_graphs). The first of a kind runs kernel by kernel, to detect whether
any op in it waits for the device; then a size is captured when it is first needed and replayed
afterwards. Capturing takes the host as long as launching, so it costs nothing while the GPU is busy
for longer than that; else a somewhat larger graph is used for a while. All graphs share one memory
pool, because one stream runs them one after another.
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

from quire.kernels.framework import lazy_fusion
from quire.sampling.sampler import ChooserKind

log = logging.getLogger(__name__)

MAX_PADDING_RATIO = 1.25
"""A graph of at most this many times the rows is used until the size has its own."""

STEPS_BEFORE_CAPTURE = 24
"""Steps of a size before it is captured."""

MAX_CAPTURE_FAILURES = 3
"""Failed captures after which no more are tried."""

GraphKey = tuple[Any, ChooserKind | None]
"""The size of a step, and how its rows are sampled; None: outside the graph."""


class GraphMemoryPool:
    """The memory that the graphs of one stream share."""

    def __init__(self) -> None:
        self.handle: Any = None  # torch's

    def get_handle(self) -> Any:
        """Return the handle, made at the first call."""
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle


class CudaGraphCache:
    """The graphs of one kind of step each: (size, kind) -> graph."""

    def __init__(
        self,
        body: Callable[[Any, ChooserKind | None], None],
        max_rows: int,
        *,
        eager: bool,
        pool: GraphMemoryPool | None = None,
    ) -> None:
        """body(size, kind): launch a step of `size` rows. eager: never capture."""
        self._body = body
        self._eager = eager
        self._sizes = capture_sizes(max_rows)
        self.pool = pool or GraphMemoryPool()
        self._captured: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._misses: Counter[GraphKey] = Counter()
        self._sync_free_kinds: set[ChooserKind | None] = set()  # kinds with bodies that never wait
        self._capture_seconds = 0.02  # seconds the last capture took
        self._failures = 0
        self.capturing = False

    def size_for(self, rows: int, kind: ChooserKind | None, spare: float = 0.0) -> int:
        """Return the number of rows at which a step of `rows` should run now.

        spare: seconds for which the GPU has work to do.
        """
        if self._eager:
            return rows
        size = self._sizes[bisect_left(self._sizes, rows)]
        if (size, kind) in self._captured or spare > self._capture_seconds:
            return size
        limit = max(rows * MAX_PADDING_RATIO, rows + 1)
        larger = [s for s, k in self._captured if k == kind and size < s <= limit]
        self._misses[size, kind] += 1
        if not larger or self._misses[size, kind] > STEPS_BEFORE_CAPTURE:
            return size
        return min(larger)

    def should_use_graph(
        self, size: Hashable, kind: ChooserKind | None, spare: float, patience: int, most: int
    ) -> bool:
        """Whether a step of this size should run here: as a graph, now or after this capture.

        False: it has occurred fewer than `patience` times and the GPU has no work for so long; or
        there are `most` graphs. spare: seconds for which the GPU has work to do.
        """
        key = (size, kind)
        if self._eager or key in self._captured:
            return not self._eager
        self._misses[key] += 1
        waited = self._misses[key] >= patience or spare > self._capture_seconds
        return waited and len(self._captured) < most

    def run(self, size: Hashable, kind: ChooserKind | None) -> None:
        """Launch a step of a size from size_for(), or one that should_use_graph() accepted."""
        graph = self._captured.get((size, kind))
        if graph is None and not self._eager:
            if kind not in self._sync_free_kinds:
                self._run_sync_check(size, kind)
                return
            graph = self._capture((size, kind))
        if graph is None:
            self._body(size, kind)
        else:
            graph.replay()

    def _run_sync_check(self, size: Hashable, kind: ChooserKind | None) -> None:
        """Run the body as a graph could. If it waits for the device, all run eagerly from then on.

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
            self._disable(error)
        else:
            self._sync_free_kinds.add(kind)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        if self._eager:
            self._body(size, kind)

    def _disable(self, error: Exception) -> None:
        log.warning("such steps run without CUDA graphs from now on: %s", error)
        lazy_fusion.discard()
        self._eager = True

    def reserve_memory(self, pieces: int, size: int) -> None:
        """Put free pieces of `size` bytes into the pool of the existing graphs, for later ones."""
        if self.pool.handle is None:
            return
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool.handle, capture_error_mode="relaxed")
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(pieces)]
        held[0].zero_()  # torch warns of graphs that do nothing
        graph.capture_end()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within, steps run kernel by kernel: they differ from later steps."""
        before, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = before

    def clear(self) -> None:
        """Drop all graphs: the addresses in them are no longer valid."""
        self._captured.clear()
        self._misses.clear()
        self.pool.handle = None

    def _capture(self, key: GraphKey) -> torch.cuda.CUDAGraph | None:
        """Capture the graph; None if that is impossible."""
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self.capturing = True
        try:
            # "relaxed": other threads of this process may use the device meanwhile
            graph.capture_begin(self.pool.get_handle(), capture_error_mode="relaxed")
            try:
                self._body(*key)
            finally:
                self.capturing = False
                graph.capture_end()
        except RuntimeError as error:
            lazy_fusion.discard()
            self._failures += 1
            log.debug("capture of %s failed", key, exc_info=True)
            if self._failures >= MAX_CAPTURE_FAILURES:
                self._disable(error)
            return None  # running it loads what the capture may have lacked
        self._captured[key] = graph
        self._capture_seconds = time.perf_counter() - began
        return graph


def capture_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows at which steps run, up to the largest step's.

    Four to each doubling, once there are many: the library's tiles pad a product about as far
    anyway, and each size costs a capture.
    """
    found = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    grain = 16
    while found[-1] < max_rows:
        found += [found[-1] + grain * i for i in range(1, 5)]
        grain *= 2
    return [*(size for size in found if size < max_rows), max_rows]


def padded_sample_rows(rows: int, max_rows: int) -> int:
    """Return the number of rows at which so many are sampled outside graphs: few, to load few
    kernels."""
    return min(1 << (rows - 1).bit_length(), max_rows) if rows else 0
