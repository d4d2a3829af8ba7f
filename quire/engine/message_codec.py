"""Message codec: encodes and decodes messages for engines in another process.

Values that Python code may put into sampling parameters (numpy numbers, sets) become plain ones.
Values that cannot be encoded are errors of the request.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from quire.engine.messages import MessageFromEngine, MessageToEngine
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


def decode_to_engine(data: bytes | memoryview) -> MessageToEngine:
    """Raises msgspec.DecodeError."""
    try:
        return _to_engine_decoder.decode(data)
    except UnicodeDecodeError as error:  # no DecodeError of msgspec's
        raise msgspec.DecodeError(str(error)) from None


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
