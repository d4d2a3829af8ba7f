"""Numbers of pooling results: averages of chunks, similarities, and the encodings of vectors.

All are computed from float32 as the engine returns it, and do not depend on what else is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.core.types import Pooled
from quire.errors import RequestError
from quire.text.pooling_input import PoolingInput, ScoreInputs

Array = NDArray[np.float32]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
_FP8_FORMATS: Mapping[str, tuple[int, int]] = {"fp8_e4m3": (3, 0x7E), "fp8_e5m2": (2, 0x7B)}
"""Bits of the mantissa, and the code of the largest finite number."""
_FP8_NAN = 0x7F


def to_array(pooled: Pooled) -> Array:
    """Return the numbers of a result, without a copy on a little-endian machine."""
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape).astype(np.float32, copy=False)


def combine(given: PoolingInput, pooled: Sequence[Pooled]) -> Array:
    """Return the result of one prompt, given those of its requests.

    Chunks of a long text are averaged by their tokens. Rows that do not count are left out.
    """
    arrays = [to_array(one) for one in pooled]
    if len(arrays) == 1:
        array = arrays[0]
        return array if given.kept_rows is None else array[list(given.kept_rows)]
    weights = [len(request.prompt) for request in given.requests]
    average = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=weights)
    if given.normalize:
        average /= max(float(np.linalg.norm(average)), 1e-12)
    return average.astype(np.float32)


def compute_scores(scores: ScoreInputs, arrays: Sequence[Array]) -> list[float]:
    """Return each pair's score. arrays: the result of each of the inputs."""
    if scores.kind == "cross_encoder":
        return [float(arrays[place].reshape(())) for (place,) in scores.places]
    if scores.kind == "late_interaction":
        return [max_sim(arrays[q], arrays[d]) for q, d in scores.places]
    wide = [one.astype(np.float64) for one in arrays]
    return [similarity(wide[q], wide[d], scores.similarity) for q, d in scores.places]


def max_sim(query: Array, document: Array) -> float:
    """Sum over tokens of a query [Q, N] of the best dot product with a document's [D, N]."""
    if not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float32))


def similarity(first: NDArray[Any], second: NDArray[Any], kind: str = "cosine") -> float:
    """Compare two vectors, summed in float64 and rounded to float32. Distances are negated."""
    if kind == "euclidean":
        value = -float(np.linalg.norm(first - second))
    elif kind == "manhattan":
        value = -float(np.abs(first - second).sum())
    else:
        value = float(np.dot(first, second))
        if kind == "cosine":
            norms = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
            value = value / norms if norms else 0.0
    return float(np.float32(value))


def encode_array(
    array: Array, dtype: str = "float32", endianness: str = "native"
) -> bytes | memoryview:
    """Return the bytes of an array, row by row. fp8: numbers beyond the range become its ends."""
    order = sys.byteorder if endianness == "native" else endianness
    mark = ">" if order == "big" else "<"
    array = np.ascontiguousarray(array)
    if dtype in ("float32", "float16"):
        kind = f"{mark}f{4 if dtype == 'float32' else 2}"
        with np.errstate(over="ignore"):  # beyond float16: infinity
            array = array.astype(kind, copy=False)
        return array.reshape(-1).view(np.uint8).data
    if dtype == "bfloat16":
        return _to_bfloat16(array).astype(f"{mark}u2", copy=False).reshape(-1).view(np.uint8).data
    return _to_fp8(array, dtype).tobytes()


def _to_bfloat16(array: Array) -> NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)


@cache
def _fp8_midpoints(dtype: str) -> NDArray[np.float64]:
    """Return what lies between neighbouring numbers of the format, from 0 up."""
    mantissa, largest = _FP8_FORMATS[dtype]
    codes = np.arange(largest + 1)
    exponents, fractions = codes >> mantissa, codes & ((1 << mantissa) - 1)
    bias = (1 << (6 - mantissa)) - 1
    normal = (1 + fractions / (1 << mantissa)) * 2.0 ** (exponents - bias)
    subnormal = fractions / (1 << mantissa) * 2.0 ** (1 - bias)
    values = np.where(exponents > 0, normal, subnormal)
    return np.asarray((values[1:] + values[:-1]) / 2)


def _to_fp8(array: Array, dtype: str) -> NDArray[np.uint8]:
    """Round to nearest, ties to even."""
    middle, size = _fp8_midpoints(dtype), np.abs(array).astype(np.float64)
    low, high = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    codes = np.where((low == high) | (low % 2 == 0), low, high)
    codes = np.where(np.isnan(array), _FP8_NAN, codes)
    return (codes | np.where(np.signbit(array), 0x80, 0)).astype(np.uint8)


def binarize(array: Array, *, signed: bool = False) -> NDArray[np.uint8] | NDArray[np.int8]:
    """Return a bit for each number, 1 from 0 up, eight in a byte, the first in its highest bit.

    signed: as int8, 128 less. Raises RequestError unless the numbers are a multiple of 8.
    """
    if array.shape[-1] % 8:
        message = "binary embeddings need a multiple of 8 numbers"
        raise RequestError(
            f"{message}, and this one has {array.shape[-1]}", param="embedding_types"
        )
    packed = np.packbits(array >= 0, axis=-1)
    return (packed.astype(np.int16) - 128).astype(np.int8) if signed else packed
