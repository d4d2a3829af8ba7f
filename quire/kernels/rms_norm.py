"""RMSNorm, with the residual add fused in when there is one.

    r = x + residual                                     rounded to x.dtype, as an add would
    y = r / sqrt(mean(r**2) + eps) * (offset + weight)   in fp32, then x.dtype

Axes: T tokens in the step (or T * H heads), E the size that is normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import DTYPES, NORM, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, e, dtype in [
        (1, 64, torch.float32),
        (7, 96, torch.bfloat16),
        (33, 1000, torch.bfloat16),
        (3, 17, torch.float32),
        (5, 2048, torch.float32),
        (64, 1024, torch.bfloat16),
        (2, 64, torch.float16),
    ]:
        x = torch.randn(t, e, device=device).to(dtype)
        r = torch.randn(t, e, device=device).to(dtype)
        w = torch.randn(e, device=device).to(dtype)
        yield {"x": x, "weight": w, "eps": 1e-6}
        yield {"x": x, "weight": w, "eps": 1e-6, "residual": r, "offset": 1.0}
    heads = torch.randn(9, 12 * 32, device=device).to(torch.bfloat16)[:, 64:256].view(9, 6, 32)
    w = torch.randn(32, device=device).to(torch.bfloat16)
    yield {"x": heads, "weight": w, "eps": 1e-5}


_run = NativeOp(NORM, "q" * 14 + "dd")


def norm_native(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    offset: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Both norms on the native kernel. x: [..., E] of 2 or 3 axes, last axis contiguous.

    weight: [E], or [H, E] for an x of [T, H, E].
    """
    code, shape, strides = DTYPES.get(x.dtype), x.shape, x.stride()
    others = [t for t in (weight, bias, residual) if t is not None]
    if code is None or not 2 <= len(shape) <= 3 or strides[-1] != 1:
        return NotImplemented
    if any(t.dtype != x.dtype or not t.is_contiguous() for t in others):
        return NotImplemented
    inner, step = (shape[1], strides[1]) if len(shape) == 3 else (1, 0)
    y = empty(shape, x.dtype)
    r = x if residual is None else empty(shape, x.dtype)
    _run(
        x.data_ptr(), strides[0], step, weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        y.data_ptr(), 0 if residual is None else r.data_ptr(),
        shape[0], inner, shape[-1], code, centred,
        0 if weight.dim() == 1 else shape[-1], eps, offset,
    )  # fmt: skip
    return y, r


def _native(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return norm_native(x, weight, None, eps, residual, offset, False)


@op(cases=_cases, native=_native, gpu="rowwise.rms_norm")
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Normalise each row of x (+ residual) over its last axis.

    x, residual: [T, E] or [T, H, E], one dtype; x may be a strided view (heads of a fused qkv).
    weight: [E]. Returns (y, r) in x.dtype; r is the next layer's residual, and x itself when
    there is no residual to add.
    """
    r = x if residual is None else x + residual
    wide = r.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y * (offset + weight.float())).to(x.dtype), r
