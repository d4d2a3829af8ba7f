"""Message codec: encodes and decodes messages for engines in another process.

Values that Python code may put into sampling parameters (numpy numbers, sets) become plain ones.
Values that cannot be encoded are errors of the request. A message to an engine has frames: the
first is msgpack, and the others are the bytes of media's tensors, which are never copied here.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.core.media.item_tensors import attach_data, detach_data
from quire.core.types import MediaItem, MediaTensor
from quire.engine.messages import AddRequests, MessageFromEngine, MessageToEngine, WireRequest
from quire.errors import RequestError

MAX_MESSAGE_BYTES = 1 << 30
"""Bytes of a message; a client that sends more is disconnected. HTTP bodies have lower limits."""
_NOT_SERIALIZABLE = (
    "is not plain data (numbers, text, lists, dicts), so it cannot be sent to the engine process"
)


def _to_plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (AbstractSet, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise RequestError(f"a {type(value).__name__} {_NOT_SERIALIZABLE}", param="sampling_params")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_to_engine_decoder: msgspec.msgpack.Decoder[MessageToEngine] = msgspec.msgpack.Decoder(
    MessageToEngine
)
_from_engine_decoder: msgspec.msgpack.Decoder[MessageFromEngine] = msgspec.msgpack.Decoder(
    MessageFromEngine
)


def encode(message: MessageToEngine | MessageFromEngine) -> bytes:
    """Raises RequestError for values that cannot be encoded."""
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"cannot be sent to the engine: {error}", param="extra_args") from None


def encode_to_engine(message: MessageToEngine) -> list[bytes]:
    """Return the frames of a message. Raises RequestError for values that cannot be encoded."""
    buffers: list[bytes] = []
    message = _with_tensors(message, partial(detach_data, buffers=buffers))
    return [encode(message), *buffers]


def decode_to_engine(frames: Sequence[bytes | memoryview]) -> MessageToEngine:
    """Return the message of these frames; media's tensors refer to them. Raises
    msgspec.DecodeError."""
    first, *others = frames or [b""]
    buffers: Iterator[Any] = iter(others)
    try:
        message = _to_engine_decoder.decode(first)
        message = _with_tensors(message, partial(attach_data, buffers=buffers))
    except ValueError as error:  # also UnicodeDecodeError, which is no DecodeError of msgspec's
        raise msgspec.DecodeError(str(error)) from None
    if next(buffers, None) is not None:
        raise msgspec.DecodeError("it has more frames than tensors")
    return message


Tensors = tuple[MediaTensor, ...]


def _with_tensors(
    message: MessageToEngine, change: Callable[[Tensors], Tensors]
) -> MessageToEngine:
    """Return the message with the tensors of each item changed, in order."""
    if not isinstance(message, AddRequests):
        return message

    def changed(item: MediaItem) -> MediaItem:
        return replace(item, tensors=change(item.tensors))

    def changed_request(one: WireRequest) -> WireRequest:
        if not one.media and one.encoder_media is None:
            return one
        own = one.encoder_media
        return msgspec.structs.replace(
            one,
            media=tuple([changed(item) for item in one.media]),
            encoder_media=None if own is None else changed(own),
        )

    return AddRequests(message.call_id, [changed_request(one) for one in message.requests])


def decode_from_engine(data: bytes) -> MessageFromEngine:
    """Raises msgspec.DecodeError."""
    try:
        return _from_engine_decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def call_id_of(data: bytes | memoryview) -> int | None:
    """The call id of a message to the engine that could not be decoded; None if it has none."""
    try:
        words = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if isinstance(words, list) and len(words) > 1 and words[0] in ("AddRequests", "UtilityCall"):
        return words[1] if isinstance(words[1], int) else None
    return None
