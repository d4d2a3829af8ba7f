"""Low-rank adapters of experts: the MLPs of tokens that have an adapter, with it.

    u = x @ gate_up[i].T + B A x        for each of a token's experts i, rounded
    h = gate(u)
    y = sum over k of weights[k] * (h @ down[i].T + B A h)

Rows without an adapter keep what moe_experts made of them, bit for bit. The others are computed
again: an adapter acts before the activation, which is inside of the kernels of that op.

Axes: T tokens, E hidden size, F width of one expert, X experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import Fp8ExpertWeights
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.framework import lazy_fusion
from quire.kernels.framework.op import op
from quire.kernels.lora import lora_linear, lora_pairs, random_bank, random_rows, sort_rows
from quire.kernels.moe_experts import ExpertActivation, bias_of, product_of
from quire.kernels.moe_experts import _cases as _mlp_cases


class ExpertsLora(NamedTuple):
    """Adapters of both products: banks of X experts, of the parts gate and up (up alone if there is
    no gate), and of down."""

    gate_up: LoraBank
    down: LoraBank


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for case in _mlp_cases(device):
        x, first, second = case["x"], case["gate_up"], case["down"]
        if not isinstance(first, (Tensor, Fp8ExpertWeights)):
            continue
        (experts, width, size), slots = first.shape, 2
        parts = case["gate"].rows
        ranks = [[5, 16][:parts]] * experts + [[8, 0][:parts]] * experts
        up = random_bank(ranks, size, (width // parts,) * parts, x.dtype, device)
        back = random_bank([one[:1] for one in ranks], second.shape[2], (size,), x.dtype, device)
        yield {
            "y": torch.randn(x.shape, device=device).to(x.dtype),
            **case,
            "lora": ExpertsLora(up, back),
            "rows": random_rows(len(x), slots, device),
        }


@op(cases=_cases, atol=8e-2, gpu="lora.lora_experts")
def lora_experts(
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
    """Replace the rows of y [T, E], the result of moe_experts, whose adapter changes the experts.

    Returns y. The others as for that op. rows: of the T tokens. Not for graphs on a GPU if a bank
    is neither plain, nor e4m3, nor of two to eight bits.
    """
    at = adapted_rows(rows, lora).nonzero()[:, 0]
    if not len(at):
        return y
    own = LoraRows.allocate(len(at), len(rows.starts) - 1, x.device)
    own.slots.copy_(rows.slots[at])
    sort_rows(own)
    x, ids, experts = x[at], ids[at], len(gate_up)
    here = ids >= 0
    pairs = lora_pairs(own, ids.clamp(min=0), experts)
    u = lora_linear(_multiply(x, ids, gate_up, gate_up_bias), x, lora.gate_up, pairs)
    lazy_fusion.flush()  # on a GPU an activation may yet join it, and this one is no op
    h = gate(u)
    out = lora_linear(_multiply(h, ids, down, down_bias), h, lora.down, pairs)
    terms = out.view(*ids.shape, -1).float() * weights[at][:, :, None]
    total = torch.where(here[:, :, None], terms, 0).sum(1)
    y[at] = total.to(y.dtype)
    return y


def adapted_rows(rows: LoraRows, lora: ExpertsLora) -> Tensor:
    """Whether the adapter of each row changes the experts: bool [T]."""
    slots = len(rows.starts) - 1
    ranks = torch.cat([bank.ranks.view(slots, -1) for bank in lora], dim=1)
    return (rows.slots >= 0) & ranks.any(1)[rows.slots.clamp(min=0)]


def _multiply(x: Tensor, ids: Tensor, bank: Any, bias: Tensor | None) -> Tensor:
    """The product of each pair's row and its expert's matrix: [T * k, O], by pair."""
    order, top = ids.flatten().argsort(stable=True), ids.numel() // len(x)
    counts = torch.bincount(ids.flatten() + 1, minlength=len(bank) + 1).tolist()
    out = x.new_zeros(ids.numel(), bank.shape[1])
    for i, some in enumerate(order.split(counts)[1:]):
        if len(some):
            out[some] = product_of(x[some // top], bank[i], bias_of(bias, i))
    return out
