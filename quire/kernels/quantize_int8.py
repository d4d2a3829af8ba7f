"""Quantizes rows of activations to signed bytes, each with its own scale or with a fixed one.

    symmetric    scale = max(|x|) / 127                  q = x * (1 / scale)
    asymmetric   scale = (max(x, 0) - min(x, 0)) / 255   q = x * (1 / scale) + zero
                 zero = -128 - min(x, 0) * (1 / scale)

Each is rounded to nearest even and clamped to -128..127. Zero is exact in both. A row with an
infinity or a NaN has scale NaN, so the fault stays visible, and in its row; with a fixed scale an
infinity is clamped. Axes: T tokens in the step, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.int8_weight import INT8_MAX, MIN_RANGE
from quire.kernels.framework.op import op

INT8_MIN = -128


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, dtype in [
        (1, 128, torch.float32),
        (7, 320, torch.bfloat16),
        (5, 4096, torch.float16),
        (3, 14336, torch.bfloat16),
    ]:
        x = (3 * torch.randn(t, i, device=device) + 1).to(dtype)
        fixed = torch.full((1,), 0.07, device=device)
        zero = torch.full((1,), -9, dtype=torch.int32, device=device)
        yield {"x": x}
        yield {"x": x, "symmetric": False}
        yield {"x": x, "static": fixed}
        yield {"x": x, "symmetric": False, "static": fixed, "static_zero": zero}
    wide = torch.randn(9, 512, device=device).to(torch.bfloat16)
    yield {"x": wide[:, 128:384]}
    yield {"x": torch.zeros(2, 64, device=device), "symmetric": False}


@op(cases=_cases, atol=0.0, gpu="linear.quantize_int8")
def quantize_int8(
    x: Tensor,
    symmetric: bool = True,
    static: Tensor | None = None,
    static_zero: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize every row of x.

    x: [T, I], rows may be strided. static: float32 [1]; static_zero: int32 [1], if asymmetric.
    Returns (q [T, I] int8, scale [T] float32, zero [T] int32); zero is 0 of symmetric rows.
    """
    wide, rows = x.float(), x.shape[0]
    no_zero = torch.zeros(rows, dtype=torch.int32, device=x.device)
    if static is not None:
        zero = no_zero if static_zero is None else static_zero.expand(rows).contiguous()
        return _codes(wide, 1.0 / static, zero), static.expand(rows).contiguous(), zero
    if symmetric:
        # a GPU would multiply by the reciprocal of a number: divide by a tensor
        largest = wide.abs().amax(1).clamp(min=MIN_RANGE)
        scale = _finite_or_nan(largest / torch.full_like(largest, INT8_MAX))
        return _codes(wide, (1.0 / scale)[:, None], no_zero), scale, no_zero
    low, high = wide.amin(1).clamp(max=0.0), wide.amax(1).clamp(min=0.0)
    span = (high - low).clamp(min=MIN_RANGE)
    scale = _finite_or_nan(span / torch.full_like(span, INT8_MAX - INT8_MIN))
    inverse = 1.0 / scale
    zero = (INT8_MIN - low * inverse).round().nan_to_num(0.0).clamp(INT8_MIN, INT8_MAX).int()
    return _codes(wide, inverse[:, None], zero), scale, zero


def _finite_or_nan(scale: Tensor) -> Tensor:
    return torch.where(scale.isfinite(), scale, torch.nan)


def _codes(wide: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
    q = ((wide * inverse).round() + zero[:, None]).nan_to_num(0.0)
    return q.clamp(INT8_MIN, INT8_MAX).to(torch.int8)
