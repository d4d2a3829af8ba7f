"""Quantizes to FP4 (e2m1) with a scale per group: MXFP4 (e8m0 scales) and NVFP4 (e4m3 scales).

    mxfp4: w[o, i] = e2m1[q] * 2 ** (e[o, g] - 127)                 32 inputs a group
    nvfp4: w[o, i] = e2m1[q] * scale[o, g] / global_scale           16 inputs a group

Of a few scales around the largest magnitude the one with the least squared error is taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.search import divide, row_chunks, weighted_error

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; 8 to 15 are negative."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
E4M3_MAX = 448.0
E8M0_BIAS = 127


def e2m1_table(device: torch.device) -> Tensor:
    """The values of the 16 codes, float32."""
    return torch.tensor([*E2M1, *(-one for one in E2M1)], device=device)


def round_to_e2m1(x: Tensor) -> Tensor:
    """uint8 codes of the nearest numbers; ties go to the even code, and -0 is 0."""
    return _codes_of_e2m1(_nearest_e2m1(x))


def _nearest_e2m1(x: Tensor) -> Tensor:
    """The nearest numbers: neighbours are 0.5 apart below 2, 1 below 4, and then 2."""
    size = x.abs()
    step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
    return ((size / step).round_() * step).clamp_(max=E2M1[-1]).copysign_(x)


def _codes_of_e2m1(values: Tensor) -> Tensor:
    size = values.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return (code + 8 * (values < 0)).to(torch.uint8)


def quantize_mxfp4(weight: Tensor) -> WeightCodes:
    """weight: [O, I] float32; I a multiple of 32. Its scales are powers of two, in float32."""
    outputs, inputs = weight.shape
    q = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = []
    for rows in row_chunks(outputs, inputs, weight.device):
        x = weight[rows].float().unflatten(-1, (-1, MXFP4_GROUP))
        largest = x.abs().amax(-1)
        exponent = largest.clamp(min=2.0**-100).log2().floor() - 2
        candidates = [torch.exp2((exponent + i).clamp(-126, 127)) for i in (0, 1, -1)]
        scale, codes = _best(x, candidates)
        q[rows] = codes
        scales.append(scale)
    return WeightCodes(
        q=q, bits=4, group=MXFP4_GROUP, scale=GroupFactors(torch.cat(scales)),
        table=e2m1_table(weight.device),
    )  # fmt: skip


def nvfp4_global_scale(largest: float) -> float:
    """The global scale of a tensor, or of the tensors of a fused layer, by their largest magnitude.

    It is a power of two, so that dividing by it is exact.
    """
    if not largest:
        return 1.0
    return 2.0 ** min(math.floor(math.log2(E4M3_MAX * E2M1[-1] / largest)), 100)


def quantize_nvfp4(weight: Tensor, global_scale: float | None = None) -> WeightCodes:
    """weight: [O, I] float32; I a multiple of 16.

    global_scale: of nvfp4_global_scale; None: that of the weight alone.
    """
    outputs, inputs = weight.shape
    if global_scale is None:
        global_scale = nvfp4_global_scale(float(weight.abs().amax()))
    q = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = []
    for rows in row_chunks(outputs, inputs, weight.device):
        x = weight[rows].float().unflatten(-1, (-1, NVFP4_GROUP))
        largest = x.abs().amax(-1) * global_scale
        candidates = [_round_to_e4m3(largest / by) / global_scale for by in (6.0, 4.0, 5.0, 7.0)]
        scale, codes = _best(x, candidates)
        q[rows] = codes
        scales.append((scale * global_scale).to(torch.float8_e4m3fn))
    shared = torch.full((outputs, 1), 1.0 / global_scale, device=weight.device)
    return WeightCodes(
        q=q, bits=4, group=NVFP4_GROUP, scale=GroupFactors(shared, torch.cat(scales)),
        table=e2m1_table(weight.device),
    )  # fmt: skip


def _round_to_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def _best(x: Tensor, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The scale [O, G] and the codes [O, I] of the candidate with the least error per group."""
    best, least = candidates[0], torch.full_like(candidates[0], torch.inf)
    for scale in candidates:
        held = _nearest_e2m1(divide(x, scale[..., None]))
        error = weighted_error(x, held * scale[..., None], None)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best, round_to_e2m1(divide(x, best[..., None])).flatten(-2)
