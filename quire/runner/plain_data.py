"""Plain data for other processes: msgpack, with tensors and int32 arrays."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Encode as msgpack. Raises TypeError for values that cannot leave the process."""
    return _encoder.encode(value)


def decode_as(data: bytes, kind: type[T]) -> T:
    """Decode a value of one type."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)


def convert(value: Any, kind: type[T]) -> T:
    """Make a value of one type from what was decoded without a type."""
    return msgspec.convert(value, kind, dec_hook=_from_plain)


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if isinstance(value, (range, frozenset)):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _from_plain(kind: type, value: Any) -> Any:
    """Arrays are int32 and writable: a worker fills in the tokens that only it has."""
    if kind is torch.Tensor:
        dtype, shape, data = value
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        if math.prod(shape):
            made.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return made
    assert issubclass(getattr(kind, "__origin__", kind), np.ndarray), kind
    return np.frombuffer(value, np.int32).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
