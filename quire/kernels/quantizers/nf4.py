"""Quantizes to NF4 as bitsandbytes does: 16 quantiles of a normal distribution, times a maximum.

    w[o, i] = table[q[o, i]] * largest[o, g]         largest in float32, usually of 64 inputs

Source: https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.quant.bitsandbytes import TABLES
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.search import divide, row_chunks


def quantize_nf4(weight: Tensor, group: int = 64) -> WeightCodes:
    """weight: [O, I]; I a multiple of group. The codes are those of bitsandbytes, bit for bit."""
    table = torch.tensor(TABLES["nf4"], device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    q = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = []
    for rows in row_chunks(weight.shape[0], weight.shape[1], weight.device):
        x = weight[rows].float().unflatten(-1, (-1, group))
        largest = x.abs().amax(-1)
        unit = x * divide(torch.ones_like(largest), largest)[..., None]
        q[rows] = torch.bucketize(unit, borders).flatten(-2)
        scales.append(largest)
    return WeightCodes(q=q, bits=4, group=group, scale=GroupFactors(torch.cat(scales)), table=table)
