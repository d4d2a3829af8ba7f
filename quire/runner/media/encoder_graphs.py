"""Encoder graphs: forward passes of a media encoder that CUDA graphs replay, at a few sizes.

What a pass reads and what it returns have fixed addresses. Items are padded to a size by the
encoder; what pads them yields rows that are dropped. Graphs are captured and run by the worker, in
the pool of its others: encoder and steps run one after another on one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.models.base import EncodesMedia
from quire.runner.parts.base import OwnGraphs
from quire.sampling.h2d import to_device

ALIGNMENT = 16
"""Bytes that each array begins at a multiple of."""


class EncoderGraphs:
    """Sizes that an encoder has graphs for, and their buffers, of an engine that is awake."""

    def __init__(self, encoder: EncodesMedia, dtype: torch.dtype, device: torch.device) -> None:
        self._encoder = encoder
        self._dtype, self._device = dtype, device
        self._sizes = list(encoder.graph_sizes())
        self._places: dict[int, dict[str, tuple[int, np.ndarray]]] = {}  # byte, and an example
        self._patches = self._arrays = torch.empty(0)
        self._rows: Tensor | None = None
        self._counts: dict[int, int] = {}  # size -> rows
        self._graphs: OwnGraphs | None = None

    @property
    def sizes(self) -> list[int]:
        """Ascending."""
        return self._sizes

    def bind(self, graphs: OwnGraphs) -> None:
        """Take what runs the graphs. Without it the encoder runs kernel by kernel."""
        self._graphs = graphs

    def allocate(self) -> None:
        """Allocate what a forward pass reads."""
        if not self._sizes or len(self._patches):
            return
        most = width = 0
        for size in self._sizes:
            width, arrays = self._encoder.graph_inputs(size)
            places, end = {}, 0
            for name, one in arrays.items():
                places[name] = end, one
                end += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
            self._places[size] = places
            most = max(most, end)
        device = self._device
        self._patches = torch.zeros((self._sizes[-1], width), dtype=self._dtype, device=device)
        self._arrays = torch.zeros(most, dtype=torch.uint8, device=device)

    def release(self) -> None:
        """Return the memory to the system."""
        self._patches = self._arrays = torch.empty(0)
        self._rows = None

    def size_for(self, patches: int) -> int | None:
        """The smallest size that has space for so many patches, if it has a graph."""
        at = bisect_left(self._sizes, patches)
        if self._graphs is None or at == len(self._sizes):
            return None
        return self._sizes[at] if self._sizes[at] in self._graphs else None

    def run(self, size: int, patches: Tensor, arrays: Mapping[str, np.ndarray]) -> Tensor:
        """Run a size's graph, on the current stream. Returns its rows, which the next run
        overwrites."""
        assert self._graphs is not None
        assert self._rows is not None
        lazy_fusion.flush()
        self._patches[: len(patches)].copy_(patches)
        self._patches[len(patches) : size].zero_()
        self._upload(size, arrays)
        self._graphs.run(size)
        return self._rows[: self._counts[size]]

    def prepare(self, size: int) -> None:
        """Upload what a forward pass of a size can read."""
        self.allocate()
        self._upload(size, {name: one for name, (_, one) in self._places[size].items()})

    def launch(self, size: int) -> None:
        """Launch the forward pass of a size, on what was uploaded last."""
        arrays = {name: self._view(start, one) for name, (start, one) in self._places[size].items()}
        rows = self._encoder.graph_forward(size, self._patches[:size], arrays)
        lazy_fusion.flush()
        if self._rows is None:  # of the largest, which is launched first
            self._rows = torch.empty_like(rows)
        self._counts[size] = len(rows)
        self._rows[: len(rows)].copy_(rows)

    def _upload(self, size: int, arrays: Mapping[str, np.ndarray]) -> None:
        places = self._places[size]
        last, example = next(reversed(places.values()))
        packed = np.zeros(last + example.nbytes, np.uint8)
        for name, (start, example) in places.items():
            one = arrays[name]
            assert (one.shape, one.dtype) == (example.shape, example.dtype), name
            packed[start : start + one.nbytes] = (
                np.ascontiguousarray(one).reshape(-1).view(np.uint8)
            )
        self._arrays[: len(packed)].copy_(to_device(packed, self._device))

    def _view(self, start: int, example: np.ndarray[Any, Any]) -> Tensor:
        dtype = torch.from_numpy(example[:0]).dtype
        return self._arrays[start : start + example.nbytes].view(dtype).view(example.shape)
