"""Experts' MLPs with adapters: both products of the pairs that have one, apart from the activation.

    sort pairs by expert and by slot; gate_up; its adapters; gate; down; its adapters; weighted sum

The sort by expert leaves out tokens without an adapter, so no weight is read for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8ExpertWeights
from quire.kernels.formats.lora_bank import LoraRows
from quire.kernels.formats.tiled_weight import TiledExperts
from quire.kernels.gpu.elementwise import act_mul
from quire.kernels.gpu.lora import lora_linear, sort_pairs
from quire.kernels.gpu.moe import grouped_gemm, moe_fp8, moe_grouped
from quire.kernels.gpu.moe.moe_experts import plan_tiles, weighted_sum
from quire.kernels.gpu.moe.moe_sort import sort_by_expert
from quire.kernels.lora_experts import ExpertsLora, adapted_rows
from quire.kernels.moe_experts import ExpertActivation


def _supports(x: Tensor, bank: Any) -> bool:
    if isinstance(bank, Tensor):
        return bank.is_contiguous() and bank.dtype == x.dtype
    if isinstance(bank, Fp8ExpertWeights):
        return moe_fp8.supports(x, bank, bank)
    return isinstance(bank, TiledExperts) and moe_grouped.supports(x, bank, bank)


def outputs(
    y: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    lora: ExpertsLora,
    rows: LoraRows,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> Tensor:
    fits = ids.is_contiguous() and weights.is_contiguous() and x.stride(1) == 1
    return y if fits and _supports(x, gate_up) and _supports(x, down) else NotImplemented


def launch(
    out: Tensor,
    y: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    gate: ExpertActivation,
    lora: ExpertsLora,
    rows: LoraRows,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    absent: bool = False,
) -> None:
    if not len(x):
        return
    experts, top, adapted = len(gate_up), ids.shape[1], adapted_rows(rows, lora)[:, None]
    # an absent pair is computed with the adapter of expert 0, and left out of the sum
    pairs = _sort_pairs(rows, ids.clamp(min=0) if absent else ids, experts)
    order, starts = sort_by_expert(torch.where(adapted, ids, experts), experts + 1)
    if absent:
        order = order.clamp(0, ids.numel() - 1)  # undefined outside of the experts' places
    u = x.new_empty((ids.numel(), gate_up.shape[1]))
    _multiply(u, x[order.long() // top], order, starts, gate_up, gate_up_bias)
    lora_linear.launch(u, u, x, lora.gate_up, pairs)
    h = _activate(u, gate)
    z = x.new_empty((ids.numel(), down.shape[1]))
    _multiply(z, h[order.long()], order, starts, down, down_bias)
    lora_linear.launch(z, z, h, lora.down, pairs)
    total = torch.empty_like(x)
    weighted_sum(total, z, weights, ids if absent else None)
    y.copy_(torch.where(adapted, total, y))


def _sort_pairs(rows: LoraRows, ids: Tensor, experts: int) -> LoraRows:
    sizes = ids.numel(), ids.numel(), (len(rows.starts) - 1) * experts + 1
    pairs = LoraRows(*(rows.slots.new_empty(size) for size in sizes))
    found = pairs.slots, pairs.order, pairs.starts
    sort_pairs.launch(found, *found, rows.order, rows.starts, ids)
    return pairs


def _multiply(
    y: Tensor, x: Tensor, order: Tensor, starts: Tensor, bank: Any, bias: Tensor | None
) -> None:
    """y[pair] = x [P, I], sorted, @ the matrix of its expert."""
    if isinstance(bank, Fp8ExpertWeights):
        moe_fp8.multiply_sorted(y, x, order, starts, bank, bias)
    elif isinstance(bank, TiledExperts):
        moe_grouped.multiply_sorted(y, x, order, starts, bank, bias)
    else:
        tile = plan_tiles(len(x) / len(bank), x.element_size())[1]
        grouped_gemm.down(y, x, order, starts, bank, bias, tile)


def _activate(u: Tensor, gate: ExpertActivation) -> Tensor:
    if gate.kind in ("clamped", "relu2"):
        return gate(u)
    h = act_mul.outputs(u, gate.kind)
    act_mul.launch(h, u, gate.kind)
    return h
