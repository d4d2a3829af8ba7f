"""x @ weight.T + bias over a weight in e4m3: rows of x are quantized first, then multiplied.

    y[t, o] = xs[t] * ws[o] * sum_i q[t, i] * w[o, i]            channels
    y[t, o] = sum_b xs[b, t] * ws[o // 128, b] * sum_i in b ...  blocks

Sums in float32, one rounding to the dtype of x. How many rows the step has changes nothing in what
is computed: few rows are quantized like many. The reference multiplies dequantized matrices; it is
correct on any device and fast on none.

Axes: T tokens in the step, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.fp8_weight import (
    BLOCK_SIZE,
    Fp8Weight,
    quantize_blocks,
    quantize_channels,
)
from quire.kernels.framework.op import op
from quire.kernels.quantize_fp8 import quantize_fp8


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, o, dtype in [
        (1, 128, 64, torch.bfloat16),
        (7, 256, 384, torch.bfloat16),
        (3, 101, 70, torch.float32),
        (33, 640, 200, torch.bfloat16),
        (70, 256, 512, torch.float16),
    ]:
        x = torch.randn(t, i, device=device).to(dtype)
        w = torch.randn(o, i, device=device) / i**0.5
        b = torch.randn(o, device=device).to(dtype)
        fixed = quantize_channels(w)
        static = torch.full((1,), 0.01, device=device)
        for weight in (fixed, quantize_blocks(w), Fp8Weight(fixed.data, fixed.scale, static)):
            yield {"x": x, "weight": weight}
            yield {"x": x, "weight": weight, "bias": b}


@op(cases=_cases, gpu="linear.fp8_linear")
def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply every row of x by a weight in e4m3.

    x: [T, I], rows may be strided. weight: [O, I]. bias: [O], x's dtype.
    Returns a new [T, O] in x.dtype.
    """
    y = multiply_quantized(*quantize_fp8(x, weight.block_size, weight.input_scale), weight)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def multiply_quantized(q: Tensor, scale: Tensor, weight: Fp8Weight) -> Tensor:
    """The product of rows already quantized, in float32: [T, O]."""
    if not weight.block_size:
        plain = q.float() @ weight.data.float().t()
        return plain * scale[:, None] * weight.scale
    finer = scale.t().repeat_interleave(BLOCK_SIZE, 1)[:, : q.shape[1]]
    return (q.float() * finer) @ weight.dequantize().t()
