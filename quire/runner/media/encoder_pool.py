"""Encoder pool: what one rank has of media items, the rows that the model's encoder made of them.

quire.core.media.encoder_cache decides which pages of the pool an item has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.config.memory.part_facts import PAGE_ROWS
from quire.core.media.encoder_slices import GIVEN_ROWS, brings_rows
from quire.core.types import MediaTensor
from quire.kernels.framework import lazy_fusion
from quire.models.base import EncoderInput, EncodesMedia, run_to_end
from quire.runner.media.encoder_graphs import EncoderGraphs
from quire.sampling.h2d import bytes_to_device, to_device

Tensors = tuple[MediaTensor, ...]


class EncodeItem(msgspec.Struct, frozen=True, array_like=True):
    """One item that is encoded, and the pages that get its rows."""

    modality: str
    num_rows: int
    tensors: tuple[MediaTensor, ...]
    pages: tuple[int, ...]

    def with_tensors(self, change: Callable[[Tensors], Tensors]) -> EncodeItem:
        """Return it with its tensors changed."""
        return msgspec.structs.replace(self, tensors=change(self.tensors))


class EncoderPool:
    """Rows [num_rows, width] in pages. An engine that sleeps has no memory for it."""

    def __init__(
        self, encoder: EncodesMedia, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._encoder = encoder
        self._shape = (num_rows // PAGE_ROWS * PAGE_ROWS, encoder.width)
        self._dtype, self._device = dtype, device
        self._rows: Tensor | None = None
        self._rows = self.allocate()
        self.graphs = encoder.graphs = EncoderGraphs(encoder, dtype, device)
        self._sliced: Generator[None, None, list[Tensor]] | None = None  # what is being encoded

    @property
    def makes_results(self) -> bool:
        """Whether rows are results of the model, in place of embeddings of tokens."""
        return self._encoder.makes_results

    @property
    def added_token(self) -> int | None:
        """The token to whose embedding rows are added; None: they take the place of embeddings."""
        return self._encoder.added_token

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Encode items, and keep their rows. On the current stream."""
        encoded = [one for one in items if not brings_rows(one.tensors)]
        made: list[Tensor] = []
        if encoded:
            made = self._encoder.encode(
                [EncoderInput(one.modality, self._load(one)) for one in encoded]
            )
            lazy_fusion.flush()
        rows = iter(made)
        found = [
            self._load(one)[GIVEN_ROWS] if brings_rows(one.tensors) else next(rows) for one in items
        ]
        self._keep(items, found)

    def begin_slices(self, items: Sequence[EncodeItem]) -> None:
        """Begin to encode items, none of which brings its rows. Drops what was begun before."""
        self._sliced = self._encoder.encode_in_slices(
            [EncoderInput(one.modality, self._load(one)) for one in items]
        )

    def encode_slice(self, first: int, last: int) -> None:
        """Run slices [first, last) of the encoder's, on the current stream; not the last one."""
        assert self._sliced is not None
        for _ in range(first, last):
            next(self._sliced)
        lazy_fusion.flush()

    def end_slices(self, items: Sequence[EncodeItem]) -> None:
        """Run the rest, and keep the rows. items: as begun, with pages; tensors are not read."""
        assert self._sliced is not None
        sliced, self._sliced = self._sliced, None
        found = run_to_end(sliced)
        lazy_fusion.flush()
        self._keep(items, found)

    def _keep(self, items: Sequence[EncodeItem], rows: Sequence[Tensor]) -> None:
        pool = self.allocate()
        for one, found in zip(items, rows, strict=True):
            if found.shape != (one.num_rows, self._shape[1]):
                raise ValueError(
                    f"the encoder made {list(found.shape)} of an item ({one.modality}) that takes "
                    f"{one.num_rows} positions; it must make rows of {self._shape[1]} numbers"
                )
            pool[to_device(row_indexes(one.pages, one.num_rows), self._device)] = found.to(
                self._dtype
            )

    def gather(self, indexes: Tensor) -> Tensor:
        """Return rows [n, width] by their indexes in the pool: int64 [n]."""
        return self.allocate().index_select(0, indexes)

    def release(self) -> None:
        """Return the memory to the system; all rows are lost. The next use allocates it again."""
        self._rows = self._sliced = None
        self.graphs.release()

    def allocate(self) -> Tensor:
        """Return all rows: [num_rows, width]. They have one address until they are released."""
        if self._rows is None:
            self._rows = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._rows

    def _load(self, item: EncodeItem) -> dict[str, Tensor]:
        return {
            one.name: bytes_to_device(one.data, getattr(torch, one.dtype), one.shape, self._device)
            for one in item.tensors
        }


def row_indexes(pages: Sequence[int], rows: int) -> np.ndarray:
    """Return where a pool has the rows of an item with these pages: int64 [rows]."""
    starts = np.array(pages, np.int64) * PAGE_ROWS
    return (starts[:, None] + np.arange(PAGE_ROWS)).reshape(-1)[:rows]
