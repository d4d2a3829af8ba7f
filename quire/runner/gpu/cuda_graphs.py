"""CUDA graph cache: replays steps from graphs, with one launch in place of hundreds.

All graphs are captured at once, when the engine starts and when its KV memory is restored. No step
captures: what has no graph is launched kernel by kernel. All graphs share one memory pool, because
one stream runs them one after another.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch

from quire.kernels.framework import late_work, lazy_fusion
from quire.runner.parts.base import PLAIN, StepVariant
from quire.sampling.sampler import ChooserKind

log = logging.getLogger(__name__)

CAPTURE_ATTEMPTS = 2
"""The first fails where the library loads a kernel in a way that no capture permits; it is loaded
then."""

MAX_WHOLE_ROWS = 8
"""Up to so many rows a decode step is one graph: the gap between two would show in its time."""

Key = TypeVar("Key", bound=Hashable)


def weak_method(method: Callable[[Key], None]) -> Callable[[Key], None]:
    """Return a function that calls a method and does not keep its object alive."""
    found = weakref.WeakMethod(method)

    def call(key: Key) -> None:
        bound = found()
        assert bound is not None, "the object of the method is gone"
        bound(key)

    return call


class CudaGraphCache(Generic[Key]):
    """The graphs of one stream: key -> graph."""

    def __init__(self, launch: Callable[[Key], None], device: torch.device) -> None:
        """launch: launch the kernels of a key's graph. They must read and write fixed addresses.

        A method of the object that owns the cache is given as weak_method().
        """
        self._device = device
        self._launch = launch
        self._captured: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch's handle
        self._reservation: torch.cuda.CUDAGraph | None = None  # keeps memory of the pool

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Key) -> None:
        """Replay the graph of the key; if there is none, launch its kernels."""
        graph = self._captured.get(key)
        if graph is None:
            self._launch(key)
        else:
            graph.replay()

    def launch_without_waits(self, key: Key) -> bool:
        """Launch the key's kernels. False: an op among them waits for the device.

        No graph can repeat that, and torch raises there.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode may miss something
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._launch(key)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            _warn(key, error)
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return True

    def capture(self, keys: Sequence[Key], reserved_bytes: int) -> None:
        """Capture the graph of each key, up to the first that fails. Nothing is executed.

        reserved_bytes: allocated first, in one piece that all graphs share. Pieces of one graph's
        sizes would not hold another's.
        """
        for key in keys:
            for attempt in range(1, CAPTURE_ATTEMPTS + 1):
                try:
                    began = time.perf_counter()
                    if self._pool is None:
                        self._reserve(reserved_bytes)
                    with late_work.preparing():
                        self._captured[key] = self._capture(partial(self._launch, key))
                    late_work.note_graph_capture(str(key), time.perf_counter() - began)
                    break
                except RuntimeError as error:
                    lazy_fusion.discard()
                    if attempt == CAPTURE_ATTEMPTS:
                        _warn(key, error)
                        return

    def clear(self) -> None:
        """Drop all graphs: the addresses in them are no longer valid."""
        self._captured.clear()
        self._reservation = self._pool = None

    def _reserve(self, size: int) -> None:
        """Put a free piece of memory into a new pool."""
        self._pool = torch.cuda.graph_pool_handle()
        self._reservation = self._capture(
            lambda: torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)[:1].zero_()
        )

    def _capture(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "relaxed": other threads of this process may use the device meanwhile
        graph.capture_begin(self._pool, capture_error_mode="relaxed")
        try:
            launch()
        finally:
            graph.capture_end()
        return graph


def _warn(key: Hashable, error: Exception) -> None:
    lazy_fusion.discard()
    log.warning("steps such as %s run without CUDA graphs from now on: %s", key, error)


class DecodeGraph(NamedTuple):
    """The key of a decode step's graph, or of one of its two parts."""

    size: int  # rows, padded
    part: Literal["whole", "forward", "sampling"]
    kind: ChooserKind | None = None  # of the sampling in it
    variant: str = ""
    drafts: bool = False  # of rows that may be of one sequence, in a forward pass


def decode_graphs(
    size: int, kind: ChooserKind | None, variant: StepVariant = PLAIN, *, drafts: bool = False
) -> tuple[DecodeGraph, ...]:
    """Return the graphs that a decode step runs in turn.

    kind None: its rows are sampled outside graphs, from the hidden states that "forward" stores.
    drafts: the step has some.
    """
    forward = DecodeGraph(size, "forward", None, variant.name, drafts)
    if kind is None:
        return (forward,)
    if size <= MAX_WHOLE_ROWS and kind != "penalised" and not drafts and not variant.few_graphs:
        return (forward._replace(part="whole", kind=kind),)
    sampling = DecodeGraph(size, "sampling", kind, variant.name if variant.changes_logits else "")
    return forward, sampling


def decode_graph_groups(
    max_rows: int, variant: StepVariant = PLAIN, draft_rows: int = 0
) -> list[list[DecodeGraph]]:
    """Return the variant's graphs of decode steps of up to max_rows rows, those of one part
    together.

    Each group begins with its largest; "forward" is the first group. draft_rows: of steps with
    drafts; if there are more than max_rows, none is penalised, as such rows have passes.
    """
    found: dict[Any, dict[DecodeGraph, None]] = {}
    steps = [(size, False) for size in variant_sizes(capture_sizes(max_rows), variant)]
    steps += [(size, True) for size in draft_sizes(draft_rows)]
    least, most = variant.least_rows, variant.most_rows or max_rows
    steps = [(size, drafts) for size, drafts in steps if drafts or least <= size <= most]
    for size, drafts in sorted(steps, key=lambda step: (step[1], -step[0])):
        for kind in (None, *get_args(ChooserKind)):
            if size > max_rows and kind == "penalised":
                continue
            for graph in decode_graphs(size, kind, variant, drafts=drafts):
                # steps without a variant have none that samples so few rows alone
                samples = variant.few_graphs and kind != "penalised" and size <= MAX_WHOLE_ROWS
                if graph.variant == variant.name or samples:
                    found.setdefault(graph[1:], {})[graph] = None
    return [sorted(group, reverse=True) for group in found.values()]


def capture_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows at which decode steps run, up to the largest step's.

    Four to each doubling, once there are many: the library's tiles pad a product about as far
    anyway, and each size costs captures.
    """
    found = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    grain = 16
    while found[-1] < max_rows:
        found += [found[-1] + grain * i for i in range(1, 5)]
        grain *= 2
    return [*(size for size in found if size < max_rows), max_rows]


def variant_sizes(sizes: list[int], variant: StepVariant) -> list[int]:
    """Return those of capture_sizes() at which decode steps of a variant run."""
    if not variant.few_graphs:
        return sizes
    return [size for i, size in enumerate(sizes) if not i or i % 2 or i + 1 == len(sizes)]


def draft_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows at which steps with drafts run, up to the largest one's: fewer
    than of other steps, because a row of padding costs little beside what drafts bring."""
    found = [2, 4, 8, 16, 24, 32, 48, 64]
    while found[-1] < max_rows:
        found += [found[-1] * 3 // 2, found[-1] * 2]
    return [*(size for size in found if size < max_rows), max_rows] if max_rows else []


def padded_sample_rows(rows: int, max_rows: int) -> int:
    """Return the number of rows at which so many are sampled outside graphs: few, to load few
    kernels."""
    return min(1 << (rows - 1).bit_length(), max_rows) if rows else 0
