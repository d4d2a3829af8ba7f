"""GGUF files of any bytes: a writer that checks nothing."""

from __future__ import annotations

import struct
from collections.abc import Sequence

NUMBER, TEXT, LIST = 4, 8, 9
F32, F16, Q4_0 = 0, 1, 2


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string with its length, or with another."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, NUMBER, struct.pack("<I", value))


def entries(kind: int, count: int, data: bytes = b"") -> bytes:
    """The value of a list."""
    return struct.pack("<IQ", kind, count) + data


def info(
    name: str | bytes,
    sizes: Sequence[int] = (32, 2),
    kind: int = F32,
    offset: int = 0,
    axes: int | None = None,
) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes) if axes is None else axes, *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def container(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    tensors: int | None = None,
    count: int | None = None,
    align: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensors is None else tensors,
        len(pairs) if count is None else count,
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % align) + data
