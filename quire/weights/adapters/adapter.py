"""An adapter as the engine holds it on the host: what is added to the parts of the model's layers.

Layers and parts are those of the served model: the part 1 of "layers.3.self_attn.qkv_proj" is k.
A layer that is one checkpoint tensor has the part 0. Names in files, and what files fuse or split,
have been resolved; each tensor is whole, not cut over ranks, contiguous, no view of a file, and has
the layout of the device's banks: B is stored by ranks. Deltas travel to ranks in other processes.

Axes: r rank (each delta has its own), I inputs, O outputs, V vocabulary, E hidden size, X experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor


class _Delta(msgspec.Struct, frozen=True, eq=False, tag=True, array_like=True):
    pass


class LinearDelta(_Delta, frozen=True, eq=False):
    """y += (x a^T) b + bias. The scale is in b and bias.

    With a magnitude (DoRA) y = f * (x W^T + x a^T b) + the layer's bias, f = magnitude / norm of
    each row of W + b^T a. Once f is known it is the factor: y = factor * y + (x a^T) b + bias. Then
    b contains it, and there is no magnitude.
    """

    a: Tensor  # [r, I]
    b: Tensor  # [r, O]
    bias: Tensor | None = None  # [O] float32
    magnitude: Tensor | None = None  # [O] float32
    factor: Tensor | None = None  # [O] float32


class EmbeddingDelta(_Delta, frozen=True, eq=False):
    """h += a[:, token] b. The scale is in b, and so is that of the embedding.

    With a magnitude h = f * (base row + that), f = magnitude / norm of each column of all scaled
    rows with their deltas. Once f is known it is the factor, as of a LinearDelta.
    """

    a: Tensor  # [r, V]
    b: Tensor  # [r, E]
    magnitude: Tensor | None = None  # [E] float32
    factor: Tensor | None = None  # [E] float32


class ExpertsDelta(_Delta, frozen=True, eq=False):
    """The same of one projection of a bank of experts. Experts of a lower rank end with zeros.

    Parts of a bank: 0 gate, 1 up, 2 down.
    """

    a: Tensor  # [X, r, I]
    b: Tensor  # [X, r, O]


class WholeWeight(_Delta, frozen=True, eq=False):
    """A weight, and the bias if the layer has one, in place of the model's."""

    weight: Tensor  # [O, I]; of an embedding [V, E]
    bias: Tensor | None = None  # [O]


class TokenRows(_Delta, frozen=True, eq=False):
    """Rows in place of those of an embedding or an output head."""

    indices: Tensor  # [n] int32, ascending
    rows: Tensor  # [n, E]
    places: Tensor  # [V] int32: of each token in rows, -1: it is not replaced


Delta = LinearDelta | EmbeddingDelta | ExpertsDelta | WholeWeight | TokenRows
Deltas = Mapping[str, Mapping[int, Delta]]
"""By layer and part."""


class PackedTensors(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """The memory of an adapter of which all tensors are views. Of equal layouts they are at the
    same places, and have the same names and shapes."""

    layout: bytes
    buffer: Tensor  # uint8


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One generation of an adapter. Equal digests mean equal answers on one model and dtype."""

    digest: str  # sha256 of all deltas and their places, hex
    rank: int  # the largest of all; 0: there are whole weights or token rows only
    nbytes: int
    deltas: Deltas
    base_model: str | None = None  # what the adapter was trained on, as its config states
    warnings: tuple[str, ...] = ()  # clauses for the log
    packed: PackedTensors | None = None


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may take. Checked before tensors are read."""

    max_rank: int = 1 << 14
    max_bytes: int = 1 << 40  # of all tensors, in the dtype that they are converted to


def tensors_of(delta: Delta) -> Iterator[tuple[str, Tensor]]:
    """Yield (field, tensor) of a delta."""
    for name in delta.__struct_fields__:
        if (value := getattr(delta, name)) is not None:
            yield name, value


def is_scaled(delta: Delta) -> bool:
    """Whether the product itself is changed, too: it has a factor or a bias."""
    if isinstance(delta, EmbeddingDelta):
        return delta.factor is not None
    return isinstance(delta, LinearDelta) and not (delta.factor is None and delta.bias is None)


def row_squares(a: Tensor, b: Tensor, rows: Iterable[Tensor]) -> Tensor:
    """The sum of squares of each row of W + b^T a: [O] float32. a, b: float32.

    rows: W [O, I] in pieces [n, I], in order.
    """
    found, at = [], 0
    for piece in rows:
        low = b[:, at : at + len(piece)].t() @ a
        found.append((piece.float() + low).square_().sum(1))
        at += len(piece)
    return torch.cat(found)
