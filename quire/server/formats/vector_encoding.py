"""Encodes pooled vectors for answers: numbers, base64 or raw bytes; dtypes, byte order, bits.

The hot path, base64 of float32, makes no Python numbers: msgspec writes bytes as base64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import RequestError
from quire.text.pooling_output import Array, EmbedDtype, Endianness, binarize, encode_array

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
BitFormat = Literal["binary", "ubinary"]
"""Signs alone, 8 in a number: 1 for values >= 0, the first in the highest bit. binary: numbers in
[-128, 127]; ubinary: in [0, 255]."""

BITS = 8
"""Numbers of a vector in one of its binary form."""


@dataclass(frozen=True, slots=True)
class VectorEncoding:
    """The form in which a request gets its vectors."""

    format: EncodingFormat | BitFormat = "float"
    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    def __post_init__(self) -> None:
        plain = self.dtype == "float32" and self.endianness == "native"
        if self.format not in ("base64", "bytes", "bytes_only") and not plain:
            name = "embed_dtype" if self.dtype != "float32" else "endianness"
            message = f"{name} needs encoding_format base64, bytes or bytes_only"
            raise RequestError(f"{message}, got {self.format}", param=name)

    @property
    def has_body_of_bytes(self) -> bool:
        """The answer is no JSON."""
        return self.format in ("bytes", "bytes_only")

    def check_size(self, size: int, param: str) -> None:
        """Raise RequestError for vectors of a size that has no such form."""
        if self.format in ("binary", "ubinary") and size % BITS:
            message = f"{param} {self.format} needs a dimension that 8 divides, got {size}"
            raise RequestError(message, param=param)

    def to_json(self, vector: Array) -> object:
        """The value in a JSON answer: nested lists, or bytes, which msgspec writes as base64."""
        if self.format == "float":
            return vector.tolist()
        if self.format in ("binary", "ubinary"):
            return binarize(vector, signed=self.format == "binary").tolist()
        return self.to_bytes(vector)

    def to_bytes(self, vector: Array) -> bytes | memoryview:
        """The numbers, row by row, in the requested dtype and byte order."""
        return encode_array(vector, self.dtype, self.endianness)
