"""Norms of outputs of W + b^T a, which DoRA divides by: each rank has the squares of its share.

A rank with some outputs has all of the sum of each; one with some inputs, or tokens, a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from quire.layers import Embedding, Linear
from quire.weights.adapters.adapter import EmbeddingDelta, LinearDelta, row_squares

ROWS_AT_ONCE = 512
"""Of a weight, in float32."""


ScaledDelta = LinearDelta | EmbeddingDelta


class NormsRequest(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """Of one layer: deltas with a magnitude, whole, by part."""

    layer: str
    deltas: Mapping[int, ScaledDelta]


class RankNorms(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """Of one part on one rank. Both [O] of the whole part; NaN: the rank does not have the row.

    is_share: the squares of all ranks add up to those of a row. bias: of the layer.
    """

    squares: Tensor
    is_share: bool
    bias: Tensor | None


def rank_norms(
    layer: Linear | Embedding, deltas: Mapping[int, ScaledDelta]
) -> dict[int, RankNorms]:
    """Compute what this rank has. Results are on the host."""
    if isinstance(layer, Embedding):
        return {0: RankNorms(_column_squares(layer, deltas[0]).cpu(), True, None)}
    found = {}
    weight = layer.weight.dequantize()
    for part, shard in enumerate(layer.weight_layout("weight")):
        if part not in deltas:
            continue
        rows, columns = shard.ranges
        own = slice(shard.start, shard.start + len(rows))
        a, b = (
            tensor.to(weight.device).float()
            for tensor in (
                deltas[part].a[:, columns.start : columns.stop],
                deltas[part].b[:, rows.start : rows.stop],
            )
        )
        squares = row_squares(a, b, weight[own].split(ROWS_AT_ONCE))
        bias = None if layer.bias is None else layer.bias[own]

        def whole(values: Tensor, rows: range = rows, size: int = shard.shape[0]) -> Tensor:
            made = torch.full((size,), torch.nan)
            made[rows.start : rows.stop] = values.float().cpu()
            return made

        found[part] = RankNorms(
            whole(squares), len(columns) < layer.inputs, None if bias is None else whole(bias)
        )
    return found


def _column_squares(layer: Embedding, delta: ScaledDelta) -> Tensor:
    """The sum of squares of each column of the scaled table and its delta: [E] float32."""
    weight, (tokens, _) = layer.weight.dequantize(), layer.weight_layout("weight")[0].ranges
    a = delta.a[:, tokens.start : tokens.stop].to(weight.device).float()
    b, total = delta.b.to(weight.device).float(), 0
    pieces = zip(weight.split(ROWS_AT_ONCE), a.split(ROWS_AT_ONCE, dim=1), strict=True)
    for rows, own in pieces:
        total = total + (rows.float() * layer.scale + own.t() @ b).square_().sum(0)
    return torch.as_tensor(total)


def scale_delta(delta: ScaledDelta, ranks: Sequence[RankNorms]) -> ScaledDelta:
    """Return a delta with its factor in place of its magnitude. ranks: of all."""
    assert delta.magnitude is not None
    squares = torch.stack([one.squares for one in ranks])
    total = squares.nansum(0) if ranks[0].is_share else _first(squares)
    factor = delta.magnitude / total.sqrt_()
    b = (delta.b.float() * factor).to(delta.b.dtype)
    if isinstance(delta, EmbeddingDelta):
        return EmbeddingDelta(delta.a, b, None, factor)
    bias = delta.bias
    if ranks[0].bias is not None:
        base = _first(torch.stack([one.bias for one in ranks if one.bias is not None]))
        shift = base * (1 - factor)
        bias = shift if bias is None else bias + shift
    return LinearDelta(delta.a, b, bias, None, factor)


def _first(rows: Tensor) -> Tensor:
    """Of each column the value of the first rank that has it."""
    at = rows.isnan().logical_not().int().argmax(0)
    return rows.gather(0, at[None])[0]
