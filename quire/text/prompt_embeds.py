"""Prompt embeddings: checks vectors that stand in place of token ids, and packs them for a request.

    tensor [n, width] -> float32 on the host -> the model's dtype -> PromptEmbeds and digests

Torch is not imported: a tensor is read by its own methods. Digests cover DIGEST_ROWS rows each, so
prompts that begin with the same vectors share cached blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.types import PromptEmbeds
from quire.errors import RequestError

Vectors = npt.NDArray[Any]

PLACEHOLDER = 0
"""Token id of a position that has a vector and no id."""
DIGEST_ROWS = 16
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class EmbedsFormat:
    """The vectors that a model reads."""

    width: int  # numbers of one vector
    dtype: str  # of the model: "bfloat16" | "float16" | "float32"


@dataclass(frozen=True, slots=True)
class PackedEmbeds:
    """The fields of a Request for prompt embeddings."""

    spans: tuple[PromptEmbeds, ...]
    extra_content: tuple[tuple[int, bytes], ...]


def check_vectors(given: Any, width: int) -> Any:
    """Return a tensor or an array as [n, width], not copied. Raises RequestError."""
    if not hasattr(given, "dtype") or not hasattr(given, "__array__"):
        raise _error(f"must be a tensor of shape [tokens, {width}], got a {type(given).__name__}")
    layout = str(getattr(given, "layout", "torch.strided")).removeprefix("torch.")
    if layout != "strided" or getattr(given, "is_nested", False):
        layout = "nested" if layout == "strided" else layout
        raise _error(f"must be a dense tensor, got the layout {layout}")
    if str(getattr(given, "device", "cpu")) == "meta":
        raise _error("is on the device meta, which holds no numbers")
    dtype = str(given.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise _error(f"must have one of the dtypes {', '.join(DTYPES)}, got {dtype}")
    shape = list(given.shape)
    if len(shape) == 3 and shape[0] == 1:
        given = given[0]
    elif len(shape) != 2:
        raise _error(f"must have the shape [tokens, {width}] or [1, tokens, {width}], got {shape}")
    if shape[-1] != width:
        raise _error(
            f"must have {width} numbers per token, the size of this model's embeddings; got "
            f"{shape[-1]} (shape {shape})"
        )
    if not shape[-2]:
        raise _error("has no rows: send at least one token")
    return given


def pack_embeds(given: Any, ids_at: Sequence[bool], model: EmbedsFormat) -> PackedEmbeds:
    """Pack the vectors [n, width] of positions that have no ids. Raises RequestError.

    ids_at: for each position whether its token id is read in place of its vector; (): none is.
    """
    array = _to_float32(given)
    spans: list[PromptEmbeds] = []
    digests: list[tuple[int, bytes]] = []
    for start, end in _vector_runs(ids_at, len(array)):
        packed = _cast(array[start:end], start, model.dtype)
        spans.append(PromptEmbeds(start, end - start, model.dtype, packed.tobytes()))
        for row in range(0, len(packed), DIGEST_ROWS):
            digests.append((start + row, sha256(packed[row : row + DIGEST_ROWS].data).digest()))
    return PackedEmbeds(tuple(spans), tuple(digests))


def _to_float32(given: Any) -> npt.NDArray[np.float32]:
    """Return a dense float32 array. A bfloat16 tensor has no numpy form of its own."""
    with np.errstate(over="ignore"):  # of float64: the result is not finite, and is refused
        if hasattr(given, "detach"):
            given = given.detach().float().numpy(force=True)
        return np.ascontiguousarray(given, dtype="<f4")


def _vector_runs(ids_at: Sequence[bool], length: int) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each run of positions without ids."""
    start = 0
    for at in range(length + 1) if ids_at else (length,):
        if at == length or (ids_at and ids_at[at]):
            if start < at:
                yield start, at
            start = at + 1


def _cast(rows: npt.NDArray[np.float32], start: int, dtype: str) -> Vectors:
    """Round to the model's dtype; bfloat16 as the upper halves of float32. Raises RequestError."""
    _check_finite(np.isfinite(rows), rows, start, "all numbers must be finite")
    if dtype == "float32":
        return rows
    if dtype == "float16":
        with np.errstate(over="ignore"):
            cast: Vectors = rows.astype("<f2")
        finite = np.isfinite(cast)
    else:
        bits = rows.view("<u4")
        cast = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")
        finite = cast & 0x7F80 != 0x7F80
    _check_finite(finite, rows, start, f"this model's dtype {dtype} has no such number")
    return cast


def _check_finite(finite: Vectors, rows: Vectors, start: int, rule: str) -> None:
    if not finite.all():
        row, column = np.argwhere(~finite)[0].tolist()
        raise _error(f"has {rows[row, column]} at [{start + row}, {column}]: {rule}")


def _error(problem: str) -> RequestError:
    return RequestError(f"prompt_embeds {problem}", param="prompt_embeds")
