"""LayerNorm, with the residual add fused in when there is one.

    r = x + residual                                      rounded to x.dtype
    y = (r - mean(r)) / sqrt(var(r) + eps) * weight + bias   in fp32, then x.dtype

Axes: T tokens in the step, H heads, E the size that is normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.rms_norm import norm_native


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in [
        (1, 64, torch.float32),
        (7, 96, torch.bfloat16),
        (33, 1000, torch.bfloat16),
        (3, 17, torch.float32),
        (2, 64, torch.float16),
    ]:
        x = torch.randn(t, e, device=device).to(dtype)
        w = torch.randn(e, device=device).to(dtype)
        b = torch.randn(e, device=device).to(dtype)
        r = torch.randn(t, e, device=device).to(dtype)
        yield {"x": x, "weight": w, "bias": b, "eps": 1e-5}
        yield {"x": x, "weight": w, "bias": b, "eps": 1e-5, "residual": r}
        yield {"x": x, "weight": w, "bias": None, "eps": 1e-5}
    heads = torch.randn(9, 12 * 24, device=device).to(torch.bfloat16)[:, 48:192].view(9, 6, 24)
    w = torch.randn(6, 24, device=device).to(torch.bfloat16)
    yield {"x": heads, "weight": w, "bias": None, "eps": 1e-5}
    yield {"x": heads.float(), "weight": w.float(), "bias": None, "eps": 1e-5}


def _native(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return norm_native(x, weight, bias, eps, residual, 0.0, True)


@op(cases=_cases, native=_native, gpu="rowwise.layer_norm")
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise each row of x (+ residual) to mean 0 and variance 1, then scale and shift.

    x, residual: [T, E], one dtype. weight, bias: [E]. Or x: [T, H, E], maybe a strided view,
    weight: [H, E], without bias and residual: each head has weights of its own.
    Returns (y, r) in x.dtype; r is x itself when there is no residual to add.
    """
    r = x if residual is None else x + residual
    wide = r.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype), r
