"""Messages to bytes and back, for engines in another process.

Values that Python code may have put into sampling parameters (numpy numbers, sets) become plain
ones here. What cannot travel is the asker's fault and said to it.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from quire.engine.messages import FromEngine, ToEngine
from quire.errors import RequestError

LONGEST = 1 << 30
"""Bytes of a message: whoever says more is cut off. Bodies of requests have their limit before."""
_LATER = "is not plain data (numbers, text, lists, dicts), so the engine process cannot have it"


def _plain(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (AbstractSet, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise RequestError(f"a {type(value).__name__} {_LATER}", param="sampling_params")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Raises RequestError for what cannot travel."""
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"cannot be sent to the engine: {error}", param="extra_args") from None


def to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError."""
    try:
        return _to_engine.decode(data)
    except UnicodeDecodeError as error:  # no DecodeError of msgspec's
        raise msgspec.DecodeError(str(error)) from None


def from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.DecodeError."""
    try:
        return _from_engine.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def number_in(data: bytes) -> int | None:
    """The number of a message to the engine that could not be read, if even that can be."""
    try:
        words = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    if isinstance(words, list) and len(words) > 1 and words[0] in ("Add", "Call"):
        return words[1] if isinstance(words[1], int) else None
    return None
