"""Tensors of media items: checked where requests arrive, and not sent again by requests that share
the KV of another one, as the beams of each round of a beam search do. Their bytes travel between
processes behind the message that has the rest: no codec copies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quire.core.types import MediaItem, MediaTensor, Request
from quire.errors import RequestError

ITEM_SIZES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}

BEHIND_BYTES = 1 << 16
"""Bytes of a tensor from which on they travel behind the message."""


def detach_data(tensors: Sequence[MediaTensor], buffers: list[bytes]) -> tuple[MediaTensor, ...]:
    """Return tensors of which the large ones have no bytes; these are added to `buffers`."""
    found = []
    for one in tensors:
        if len(one.data) >= BEHIND_BYTES:
            buffers.append(one.data)
            one = replace(one, data=b"")
        found.append(one)
    return tuple(found)


def attach_data(
    tensors: Sequence[MediaTensor], buffers: Iterator[bytes]
) -> tuple[MediaTensor, ...]:
    """Return tensors with the bytes that detach_data() took. Raises ValueError for missing ones."""
    found = []
    for one in tensors:
        if not one.data and 0 not in one.shape:
            data = next(buffers, None)
            if data is None:
                raise ValueError(f"the bytes of {one.name!r:.40} are missing")
            one = replace(one, data=data)
        found.append(one)
    return tuple(found)


def without_tensors(request: Request) -> Request:
    """Return a request whose items have no tensors: its parent has them."""
    return _changed(request, lambda item: replace(item, tensors=()))


def with_tensors_of(request: Request, parent: Request) -> Request:
    """Return a request whose items without tensors have those of the parent's equal items.

    Raises RequestError if the parent has no such item.
    """
    owned = {one.digest: one for one in _items(parent)}

    def find(item: MediaItem) -> MediaItem:
        if item.tensors:
            return item
        if item.digest not in owned:
            raise _wrong(item, "has no content, and the request that it continues has none")
        return replace(item, tensors=owned[item.digest].tensors)

    return _changed(request, find)


def check_tensors(request: Request) -> None:
    """Raise RequestError for tensors whose bytes do not fit their shape, or that are missing."""
    for item in _items(request):
        if not item.tensors and request.parent is None:
            raise _wrong(item, "has no content")
        for one in item.tensors:
            if not _is_whole(one):
                shape = f"{one.dtype} of shape {list(one.shape)!r:.80}"
                raise _wrong(item, f"has {len(one.data)} bytes of {one.name!r:.40}, {shape}")


def _is_whole(tensor: MediaTensor) -> bool:
    size = ITEM_SIZES.get(tensor.dtype, 0)
    return min(tensor.shape, default=0) >= 0 < size and (
        math.prod(tensor.shape) * size == len(tensor.data)
    )


def _items(request: Request) -> tuple[MediaItem, ...]:
    return request.media if request.encoder_media is None else (request.encoder_media,)


def _changed(request: Request, change: Callable[[MediaItem], MediaItem]) -> Request:
    if request.encoder_media is not None:
        return replace(request, encoder_media=change(request.encoder_media))
    return replace(request, media=tuple(map(change, request.media))) if request.media else request


def _wrong(item: MediaItem, problem: str) -> RequestError:
    message = f"the {item.modality} at position {item.start} of the prompt {problem}"
    return RequestError(message, param=item.modality)
